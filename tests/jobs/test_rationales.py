"""Jobs that write behind chosen rows: transformers writes the same, and nothing changes a score or a text."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows, words_of
from tests.jobs.test_shards import merge

ROWS = 44
TOKENS = 12
COLUMNS = ("rationale", "rationale_tokens", "finish_reason", "rationale_gap", "rationale_source")
EXACT = ("rationale", "rationale_tokens", "finish_reason", "rationale_source")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def make_input(kind: str = "parquet") -> Path:
    columns = {"prompt": texts(ROWS), "id": [f"r{i}" for i in range(ROWS)], "stars": [i % 5 for i in range(ROWS)]}
    if kind == "parquet":
        return write_parquet("in.parquet", **columns)
    rows = zip(*columns.values(), strict=True)
    return write_jsonl("in.jsonl", [dict(zip(columns, row, strict=True)) for row in rows])


def written(output: str = "out.parquet", *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names or EXACT) for row in read_output(output)]


class Writer:
    """transformers' own generate, one prompt at a time."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()

    def __call__(self, text: str, tokens: int = TOKENS) -> tuple[str, int, str]:
        """What it writes greedily behind a text: the text, its tokens without the stop token, and why it ends."""
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            found = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
            )[0].tolist()
        new = found[ids.shape[1] :]
        stopped = new[-1] == self.model.config.eos_token_id
        new = new[:-1] if stopped else new
        before = self.tokenizer.decode(ids[0], skip_special_tokens=True)
        whole = self.tokenizer.decode([*ids[0].tolist(), *new], skip_special_tokens=True)
        return whole[len(before) :].strip(), len(new), "stop" if stopped else "length"


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job without rationales."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        cut_small_windows(patch)
        assert score(make_input(), model=model, id_column="id", keep_columns="stars")["exit_code"] == 0
        return read_output("out.parquet")


@pytest.fixture(scope="module")
def texts_of(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What a job without speculation draws for all rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("texts"))
        cut_small_windows(patch)
        assert score(make_input(), **drawn(model, speculation="off"))["exit_code"] == 0
        return written()


def drawn(model: Path, **more: Any) -> dict[str, Any]:
    """Flags of a job that draws its texts, by a condition on a column of the input and the score."""
    given = {"model": model, "id_column": "id", "keep_columns": "stars", "rationale": TOKENS, "rationale_seed": 5}
    given |= {"rationale_temperature": 0.9, "rationale_when": "stars != 2 and score >= 0"}
    return given | more


def test_the_text_is_what_transformers_writes_and_scores_stay(model: Path, plain: list[dict[str, Any]]) -> None:
    middle = statistics.median(row["score"] for row in plain)
    flags = {"model": model, "id_column": "id", "keep_columns": "stars", "rationale": TOKENS}
    summary = score(make_input(), rationale_when=f"score > {middle} or stars == 1", **flags)
    assert summary["exit_code"] == 0, summary
    writer, rows = Writer(model), read_output("out.parquet")
    for row, before, prompt in zip(rows, plain, texts(ROWS), strict=True):
        assert row["score"] == pytest.approx(before["score"], abs=1e-6)
        if not (before["score"] > middle or before["stars"] == 1):
            assert [row[name] for name in COLUMNS] == [None] * 5
            continue
        wanted = writer(f"{prompt} {row['prediction']} because")
        assert (row["rationale"], row["rationale_tokens"], row["finish_reason"]) == wanted
        assert row["rationale_gap"] > 0
        assert row["rationale_source"] == "full"
    chosen = [row for row in rows if row["finish_reason"] is not None]
    assert 0 < len(chosen) < ROWS
    report = read_report()["rationales"]
    assert (report["rows"], report["tokens"]) == (len(chosen), sum(row["rationale_tokens"] for row in chosen))
    assert report["written_tokens"] >= report["tokens"]
    assert report["decode_seconds"] > 0
    assert report["kept_prompts"] + report["again_prompts"] == len(chosen)
    assert summary["rationales"]["rows"] == len(chosen)


def test_a_template_may_say_anything_and_stop_tokens_end_a_text(model: Path) -> None:
    template = "{{ labels|join(' or ') }}? {{ label }}:"
    score(make_input(), model=model, rationale=80, rationale_template=template, limit=6)
    writer = Writer(model)
    for row, prompt in zip(read_output("out.parquet"), texts(ROWS), strict=False):
        wanted = writer(f"{prompt} Yes or No? {row['prediction']}:", 80)
        assert (row["rationale"], row["rationale_tokens"], row["finish_reason"]) == wanted


def test_zero_tokens_are_no_rationale(model: Path, plain: list[dict[str, Any]]) -> None:
    score(make_input(), model=model, id_column="id", keep_columns="stars", rationale=0)
    rows = read_output("out.parquet")
    assert [*rows[0]] == [*plain[0]]
    for row, before in zip(rows, plain, strict=True):
        assert {**row, "seconds": 0} == {**before, "seconds": 0}
    assert "rationales" not in read_report()
    fingerprint = read_report()["fingerprint"]
    score("in.parquet", "other.parquet", model=model, id_column="id", keep_columns="stars")
    assert read_report("other.run.json")["fingerprint"] == fingerprint


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "flags",
    [
        {"speculation": "off"},
        {"speculation": "lookup", "speculation_tokens": 3},
        {"speculation": "retrieval", "retrieval_budget": 16, "retrieval_chunk": 4},
        {"pack_tokens": 64},
        {"chunk_tokens": 16},
        {"workers": 2},
    ],
    ids=lambda flags: " ".join(f"{name}={value}" for name, value in flags.items()),
)
def test_no_option_of_speed_changes_a_text(model: Path, texts_of: list[tuple[Any, ...]], flags: dict) -> None:
    assert score(make_input(), **drawn(model, **flags))["exit_code"] == 0
    assert written() == texts_of
    assert sum(text is not None for text, *_ in texts_of) == sum(i % 5 != 2 for i in range(ROWS))


def test_another_seed_draws_other_texts(model: Path, texts_of: list[tuple[Any, ...]]) -> None:
    score(make_input(), **drawn(model, rationale_seed=6))
    pairs = [(ours[0], theirs[0]) for ours, theirs in zip(written(), texts_of, strict=True) if ours[0] is not None]
    assert sum(ours != theirs for ours, theirs in pairs) > len(pairs) / 2


def test_a_killed_job_goes_on_with_the_same_texts(model: Path, texts_of: list[tuple[Any, ...]]) -> None:
    given = words_of(drawn(model))
    hold = Hold("prefillcli.engines.torch:TorchEngine.answer", call=3)
    command = Command("score", make_input(), *given, "--pack-tokens", 100, "-o", "out.parquet", hold=hold)
    command.wait_until_held()
    command.kill()
    before = [*Path("out.parquet.prefill").glob("part-*.parquet")]
    assert before
    assert score("in.parquet", resume=True, **drawn(model))["exit_code"] == 0
    assert written() == texts_of
    assert read_report()["rationales"]["written_tokens"] < sum(tokens or 0 for _, tokens, *_ in texts_of)


def test_shards_write_the_same_texts(model: Path, texts_of: list[tuple[Any, ...]]) -> None:
    source = make_input()
    for number in (1, 2):
        assert score(source, **drawn(model, shard=f"{number}/2"))["exit_code"] == 0
    assert merge()["exit_code"] == 0
    assert written() == texts_of
    assert read_report()["rationales"]["rows"] == sum(text is not None for text, *_ in texts_of)


def test_json_lines_choose_and_hold_the_same(model: Path, texts_of: list[tuple[Any, ...]]) -> None:
    assert score(make_input("jsonl"), "out.jsonl", **drawn(model))["exit_code"] == 0
    assert written("out.jsonl") == texts_of


def test_engine_hf_writes_the_same(model: Path) -> None:
    score(make_input(), model=model, rationale=TOKENS, rationale_when="row < 6")
    score("in.parquet", "hf.parquet", model=model, rationale=TOKENS, rationale_when="row < 6", engine="hf")
    assert written("hf.parquet") == written()
    assert pq.read_schema("hf.parquet").names == pq.read_schema("out.parquet").names


def test_the_report_has_texts_only_where_they_are_shown(model: Path) -> None:
    flags = {"model": model, "rationale": TOKENS, "id_column": "id"}
    score(make_input(), **flags)
    longest = max((text for text, *_ in written()), key=len)
    assert json.dumps(longest)[1:-1] not in Path("out.run.json").read_text()
    assert read_report()["rationales"]["shown"] == []
    score("in.parquet", "shown.parquet", show_text=True, **flags)
    shown = read_report("shown.run.json")["rationales"]["shown"]
    assert [each["id"] for each in shown] == [f"r{i}" for i in range(10)]
    assert [each["rationale"] for each in shown] == [text for text, *_ in written()][:10]
