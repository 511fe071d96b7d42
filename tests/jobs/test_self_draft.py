"""Jobs with `--draft self`: the model's own first layers choose what the others read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from prefillcli.errors import UsageError
from prefillcli.reading.compress import draft as self_draft
from tests.jobs.compression import (
    CHUNK,
    FIRST,
    HOW,
    LAST,
    POOL,
    RATE,
    SAME,
    WINDOW,
    Prompt,
    assert_close,
    full_rows,
    lines_of,
    unrelated,
)
from tests.jobs.jobs import Reference, read_output, read_report, score, write_jsonl
from tests.jobs.models import save_model
from tests.unit.walk.test_thinning import kept_by_hand

OWN: dict[str, Any] = {"draft": "self", "lookahead": None}


def compressed(inputs: Any, output: str = "out.parquet", **flags: Any) -> dict[str, Any]:
    """The summary of a job that compresses in the way of `HOW`, without the options that are None."""
    given = {"overwrite": True, **HOW, **flags}
    return score(inputs, output, **{name: value for name, value in given.items() if value is not None})


class OwnLayersByHand:
    """A model of transformers, called by hand: its first layers over whole prompts, the others over a part."""

    def __init__(self, reference: Reference, path: Path, layers: int) -> None:
        self._reference = reference
        self._layer = layers - 1
        self.model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()

    @torch.inference_mode()
    def kept(self, prompt: Prompt, rate: float = RATE) -> np.ndarray:
        """What the last `WINDOW` tokens look at in the last of the first layers, and both ends."""
        self.model.set_attn_implementation("eager")
        layer = self.model(torch.tensor([prompt]), output_attentions=True, use_cache=False).attentions[self._layer]
        votes = F.avg_pool1d(layer[0, :, -WINDOW:], POOL, 1, POOL // 2).amax(0).mean(0).numpy().astype(float)
        means = [votes[at : at + CHUNK].mean() for at in range(0, len(prompt), CHUNK)]
        best = sorted(range(len(means)), key=lambda chunk: -means[chunk])[: math.ceil(round(rate * len(means), 9))]
        at = np.arange(len(prompt))
        return at[np.isin(at // CHUNK, best) | (at < FIRST) | (at >= len(prompt) - LAST)]

    def score(self, prompt: Prompt, kept: np.ndarray) -> float:
        """Share of Yes."""
        logits = self.logits(prompt, kept)[-1]
        yes, no = (float(logits[self._reference.token(text)]) for text in (" Yes", " No"))
        return 1 / (1 + math.exp(no - yes))

    def logits(self, prompt: Prompt, kept: np.ndarray) -> torch.Tensor:
        """Of the kept tokens, [kept, vocabulary]."""
        return kept_by_hand(self.model, np.asarray(prompt), kept, self._layer)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers: the first two read whole prompts."""
    return save_model(tmp_path_factory.mktemp("models") / "deep", layers=4, seed=5)


@pytest.fixture(scope="module")
def own(deep: Path) -> OwnLayersByHand:
    return OwnLayersByHand(Reference(deep), deep, 2)


def users(reference: Reference, rows: int = 4) -> list[Prompt]:
    """Rows of three users: a long history, which the user's rows share, and a part of their own."""
    histories = unrelated(reference, [201, 158, 240], seed=1)
    ends = unrelated(reference, [48 + 7 * row for row in range(rows)], seed=2)
    return [history + end for history in histories for end in ends]


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    assert_close(rows, others)
    for name in ("method", "kept_tokens", "prompt_tokens"):
        assert [row[name] for row in rows] == [row[name] for row in others]


def test_rows_answer_from_the_tokens_that_the_first_layers_choose(
    deep: Path, reference: Reference, own: OwnLayersByHand
) -> None:
    prompts = unrelated(reference, [300, 65, 129, 200, 163, 90])
    assert compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=deep, **OWN)["exit_code"] == 0
    rows = read_output("out.parquet")
    for row, prompt in zip(rows, prompts, strict=True):
        kept = own.kept(prompt)
        assert (row["method"], row["kept_tokens"]) == ("self-draft", len(kept))
        assert row["score"] == pytest.approx(own.score(prompt, kept), abs=1e-5)
    differences = [abs(own.score(p, np.arange(len(p))) - row["score"]) for p, row in zip(prompts, rows, strict=True)]
    assert max(differences) > 0.01, "reading less must change an answer, or nothing is tested"
    report = read_report()
    assert report["keep"] == RATE
    assert report["methods"] == {"self-draft": len(prompts)}
    assert report["tokens"]["kept"] == sum(row["kept_tokens"] for row in rows)
    assert report["tokens"]["draft"] == 0


def test_the_layer_can_be_chosen(deep: Path, reference: Reference) -> None:
    prompts = unrelated(reference, [200, 163, 90])
    compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=deep, **OWN, self_layer=3)
    later = OwnLayersByHand(Reference(deep), deep, 3)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        assert row["score"] == pytest.approx(later.score(prompt, later.kept(prompt)), abs=1e-5)


def test_a_rate_of_one_is_the_job_without_it(deep: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(users(reference)))
    full = full_rows(source, deep)
    compressed(source, model=deep, **OWN, keep=1.0)
    assert [row["score"] for row in read_output("out.parquet")] == [row["score"] for row in full]
    assert {row["method"] for row in read_output("out.parquet")} == {"full"}


def test_rows_are_obeyed(deep: Path, reference: Reference, own: OwnLayersByHand) -> None:
    prompts = unrelated(reference, [200, 64, 40, 180, 170, 65, 50])
    wish, keeps = [False, None, ..., None, ..., False, True], [None, None, ..., None, 0.6, 0.5, ...]
    source = write_jsonl("in.jsonl", lines_of(prompts, specprefill=wish, keep=keeps))
    full = full_rows(source, deep)
    compressed(source, model=deep, **OWN)
    rows = read_output("out.parquet")
    assert [row["method"] for row in rows] == ["full"] * 3 + ["self-draft"] * 2 + ["full", "self-draft"]
    whole = [number for number, row in enumerate(rows) if row["method"] == "full"]
    assert_close([rows[number] for number in whole], [full[number] for number in whole])
    for number in (3, 4, 6):
        kept = own.kept(prompts[number], 0.6 if number == 4 else RATE)
        assert rows[number]["kept_tokens"] == len(kept)
        assert rows[number]["score"] == pytest.approx(own.score(prompts[number], kept), abs=1e-5)


def test_a_shared_prefix_is_computed_once(deep: Path, reference: Reference) -> None:
    prompts = users(reference)
    compressed(write_jsonl("in.jsonl", lines_of(prompts)), model=deep, **OWN, keep_private=True)
    rows = read_output("out.parquet")
    assert all(row["method"] == "self-draft" for row in rows)
    assert read_report()["tokens"]["computed"] < 0.6 * sum(map(len, prompts))
    assert all(row["kept_tokens"] < row["prompt_tokens"] for row in rows)


@pytest.mark.parametrize("packs", [{"chunk_tokens": 16}, {"pack_tokens": 300}])
def test_rows_that_choose_for_themselves_depend_on_nothing_else(
    deep: Path, reference: Reference, own: OwnLayersByHand, packs: dict[str, int]
) -> None:
    prompts = users(reference)
    source = write_jsonl("in.jsonl", lines_of(prompts))
    compressed(source, model=deep, **OWN, compress_per_row=True, **packs)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        kept = own.kept(prompt)
        assert row["kept_tokens"] == len(kept)
        assert row["score"] == pytest.approx(own.score(prompt, kept), abs=1e-5)


def test_the_audit_reads_rows_both_ways(deep: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(users(reference)))
    full = full_rows(source, deep)
    compressed(source, model=deep, **OWN)
    plain = read_output("out.parquet")
    compressed(source, model=deep, **OWN, audit=7)
    rows = read_output("out.parquet")
    assert_same(rows, plain)
    audited = [number for number, row in enumerate(rows) if row["audit_score"] is not None]
    assert len(audited) == 7
    for number in audited:
        assert rows[number]["audit_score"] == pytest.approx(full[number]["score"], abs=SAME)
        assert rows[number]["audit_prediction"] == full[number]["prediction"]
    assert read_report()["audits"]["answer"]["rows"] == 7


def test_keep_auto_tries_rates(deep: Path, reference: Reference) -> None:
    source = write_jsonl("in.jsonl", lines_of(users(reference)))
    auto = {"keep": "auto", "max_flips": 0.5, "audit": 8}
    assert compressed(source, model=deep, **OWN, **auto)["exit_code"] == 0
    report = read_report()
    trials = report["keep_auto"]["trials"]
    assert trials[-1]["keep"] == report["keep"] or report["keep"] == 1
    assert all(trial["rows"] == 8 for trial in trials)
    if report["keep"] < 1:
        rows = read_output("out.parquet")
        compressed(source, model=deep, **OWN, keep=report["keep"])
        assert_same(rows, read_output("out.parquet"))


def test_prompts_whose_votes_are_no_numbers_are_read_in_full(
    deep: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [120] * 3)))

    def nothing(*_: object) -> np.ndarray:
        return np.full(120, np.nan, dtype=np.float32)

    with monkeypatch.context() as patched:
        patched.setattr(self_draft, "importance", nothing)
        compressed(source, model=deep, **OWN)
    rows, full = read_output("out.parquet"), full_rows(source, deep)
    assert [row["method"] for row in rows] == ["fallback:draft_not_finite"] * 3
    assert_close(rows, full)
    assert [row["kept_tokens"] for row in rows] == [120] * 3


def test_a_folder_of_that_name_is_a_draft(model: Path, reference: Reference) -> None:
    save_model(Path("self"), seed=3, layers=1)
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [120, 90])))
    compressed(source, model=model, draft="./self")
    assert {row["method"] for row in read_output("out.parquet")} == {"specprefill"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"self_layer": "4"}, "the model has 4"),
        ({"keep": None}, "nothing to compress"),
        ({"engine": "hf"}, "the hf engine has no"),
    ],
)
def test_what_does_not_go_together_is_refused(
    deep: Path, reference: Reference, capsys: pytest.CaptureFixture[str], flags: dict[str, Any], message: str
) -> None:
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [120])))
    try:
        given = {name: value for name, value in (HOW | OWN | {"keep": 0.2} | flags).items() if value is not None}
        told = ""
        assert score(source, model=deep, **given)["exit_code"] == 2
    except UsageError as error:
        told = str(error)
    assert message in told + capsys.readouterr().err
