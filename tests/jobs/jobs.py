"""Running a job in this process, reading what it wrote, and the reference its scores are held against."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from jsonschema_rs import Draft202012Validator
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefillcli.core.scorer import Granularity
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.scoring.score import score_job

TOLERANCE = 1e-5
#: Of the jobs that `score` runs.
granularity = Granularity()
HISTORIES = (
    "The quick brown fox saw a dog, and no dog saw the brown fox. yes, no, yes!",
    "Le renard saute — très vite — par-dessus le chien paresseux; où donc?",
    "no yes no",
)


def texts(count: int) -> list[str]:
    """Prompts that share three histories, each with an end of its own."""
    return [f"{HISTORIES[i % 3]} {'fox ' * (i % 5)}number {i * 7919 % 1000}\nAnswer:" for i in range(count)]


def score(inputs: str | Path | Sequence[str | Path], output: str | Path | None = "out.parquet", **flags: Any) -> dict:
    """The summary of a job run in this process with these flags and nothing from the environment."""
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    given = {"inputs": [str(name) for name in names], "output": output, "quiet": True, **flags}
    texts = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    summary = score_job(load_settings(ScoreSettings, texts, environment={}), granularity)
    if Path(summary["report"] or "").is_file():
        read_report(summary["report"])
    return summary


def beside_answers(err: str) -> list[str]:
    """The lines on stderr, without those that say that a model of random weights does not answer."""
    whole = re.sub(r"prefill: warning: .* of the probability on average .*\ncheck that .*\n", "", err)
    return [line for line in whole.splitlines() if "rows have the answer" not in line]


def read_output(path: str | Path) -> list[dict[str, Any]]:
    """The rows of an output in order: Parquet, JSON Lines, CSV or a directory of parts."""
    path = Path(path)
    if path.is_dir():
        return [row for part in sorted(path.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        kinds = pa.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
        whole = pa.csv.ReadOptions(block_size=max(path.stat().st_size, 1))
        form = pa.csv.ParseOptions(newlines_in_values=True)
        return pa.csv.read_csv(path, whole, form, kinds).to_pylist()
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = pa.input_stream(pa.py_buffer(data), compression="zstd").read()
    return [json.loads(line) for line in data.decode().splitlines()]


def without_seconds(path: str | Path = "out.parquet") -> list[dict[str, Any]]:
    """The rows of an output without what differs from run to run."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_output(path)]


@cache
def run_schema() -> Draft202012Validator:
    """The schema of `run.json`, but no key may be unknown: a later version may add some. Only phases are free."""
    schema = json.loads((Path(__file__).parents[2] / "schema" / "run.schema.json").read_text())
    for name, each in (schema["$defs"] | {"run.json": schema}).items():
        if "properties" in each:  # not a mapping
            each["additionalProperties"] = name == "Seconds"
    return Draft202012Validator(schema)


def read_report(path: str | Path = "out.run.json") -> dict[str, Any]:
    """The content of a report. That of a `run.json` is held against its schema."""
    report: dict[str, Any] = json.loads(Path(path).read_text())
    if "run_id" in report:
        run_schema().validate(report)
    return report


def write_parquet(path: str | Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return Path(path)


def write_jsonl(path: str | Path, rows: Sequence[Any]) -> Path:
    """Rows as JSON Lines, compressed by the ending; bytes are a line as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    data = b"".join(line + b"\n" for line in lines)
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


@dataclass(frozen=True)
class Answer:
    """What the reference says of a prompt."""

    score: float
    logprobs: tuple[float, ...]
    label_mass: float
    best: int
    prompt_tokens: int


class Reference:
    """A model directory under transformers' own eager forward, one prompt at a time."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options).eval()

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    def token(self, text: str) -> int:
        """The one token of a text."""
        (token,) = self.ids(text, special=False)
        return token

    def answer(
        self,
        prompt: str | Sequence[int],
        labels: Sequence[Sequence[str]] = ((" Yes",), (" No",)),
        temperature: float = 1.0,
    ) -> Answer:
        """The answer after a text (BOS first) or after token ids, for labels given by the spellings of each."""
        ids = self.ids(prompt) if isinstance(prompt, str) else list(prompt)
        probabilities = self._probabilities(tuple(ids))
        label_probability = [sum(float(probabilities[self.token(s)]) for s in label) for label in labels]
        sharpened = [p ** (1 / temperature) for p in label_probability]
        return Answer(
            score=sharpened[0] / sum(sharpened),
            logprobs=tuple(math.log(p) for p in label_probability),
            label_mass=sum(label_probability),
            best=max(range(len(labels)), key=label_probability.__getitem__),
            prompt_tokens=len(ids),
        )

    @cache  # noqa: B019 - one or two references live as long as the tests
    def _probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Probabilities of the next token, float64 [vocabulary]."""
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        return torch.softmax(logits.double(), dim=-1)


def assert_scored(
    rows: Sequence[dict[str, Any]], wanted: Sequence[Answer], names: Sequence[str] = ("Yes", "No")
) -> None:
    """Every row has the reference's answer, in order."""
    assert len(rows) == len(wanted)
    for row, answer in zip(rows, wanted, strict=True):
        assert row["error"] is None, row["error_detail"]
        assert abs(row["score"] - answer.score) < TOLERANCE
        for name, logprob in zip(names, answer.logprobs, strict=True):
            assert abs(row[f"logprob_{name}"] - logprob) < 1e-4
        assert abs(row["label_mass"] - answer.label_mass) < TOLERANCE
        assert row["prediction"] == names[answer.best]
        assert row["prompt_tokens"] == row["kept_tokens"] == answer.prompt_tokens
        assert row["method"] == "full"
        assert row["truncated"] is False
    spread = [answer.score for answer in wanted]
    assert len(wanted) < 3 or max(spread) - min(spread) > 0.05, "scores must differ enough to tell a wrong one"
