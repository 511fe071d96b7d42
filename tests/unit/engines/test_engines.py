"""One command, whatever the engine: the same rows in, the same rows, columns and reports out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.engines.base import sequences
from prefillcli.errors import Interrupted, ResourceError
from prefillcli.options.engines import ENGINES
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from tests.jobs.jobs import (
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.models import save_model
from tests.jobs.processes import flush_often
from tests.unit.engines import fake
from tests.unit.engines.encoder_models import save_encoder

EXACT = 1e-5
PARTS_OF_TIME = ("seconds", "shared_tokens", "computed_tokens")


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "fake", fake.KIND)


def bad_rows() -> list[Any]:
    """Rows of every kind, good ones between them, some with equal and some with long prompts."""
    good = [{"id": f"g{i}", "prompt": text} for i, text in enumerate([*texts(7), texts(7)[0]])]
    bad = [
        {"id": "null", "prompt": None},
        {"id": "empty", "prompt": " "},
        {"id": "type", "prompt": 7},
        b'{"id": "json", "prompt": "x"',
        {"id": "g0", "prompt": "twice"},
        {"id": "long", "prompt": "fox " * 150},
    ]
    return [row for pair in zip(good, bad, strict=False) for row in pair] + good[len(bad) :]


@pytest.mark.parametrize(("engine", "on_long"), [("fake", "skip"), ("hf", "error"), ("hf", "truncate-middle")])
def test_rows_order_columns_and_errors_do_not_depend_on_the_engine(model: Path, engine: str, on_long: str) -> None:
    source = write_jsonl("in.jsonl", bad_rows())
    job = {"model": model, "id_column": "id", "keep_columns": "prompt", "max_length": 120, "on_long": on_long}
    wanted = score(source, "torch.parquet", **job)
    found = score(source, engine=engine, engine_options={}, **job)
    assert found["rows"] == wanted["rows"]
    assert found["exit_code"] == wanted["exit_code"] == 3
    rows, others = read_output("out.parquet"), read_output("torch.parquet")
    assert list(rows[0]) == list(others[0])
    for row, other in zip(rows, others, strict=True):
        same = set(row) - {*PARTS_OF_TIME, "score", "logprob_Yes", "logprob_No", "label_mass", "prediction"}
        assert {name: row[name] for name in same} == {name: other[name] for name in same}
        if row["score"] is not None and engine != "fake":
            assert abs(row["score"] - other["score"]) < EXACT
            assert abs(row["label_mass"] - other["label_mass"]) < EXACT
    report = read_report()
    assert report["settings"]["engine"] == engine
    assert report["tokens"]["computed"] == sum(row["computed_tokens"] or 0 for row in rows)
    assert report["tokens"]["prompt"] == sum(row["prompt_tokens"] or 0 for row in rows if row["error"] is None)


def test_hf_gives_the_eager_forwards_answers_and_computes_every_token(model: Path, reference: Reference) -> None:
    prompts = texts(12)
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=model, engine="hf")["exit_code"] == 0
    rows = read_output("out.parquet")
    assert_scored(rows, [reference.answer(text) for text in prompts])
    assert all(row["computed_tokens"] == row["prompt_tokens"] and row["shared_tokens"] == 0 for row in rows)
    assert all(row["seconds"] > 0 for row in rows)
    score(source, "eager.parquet", model=model, engine="hf", engine_options=["attn_implementation=eager"])
    for row, text in zip(read_output("eager.parquet"), prompts, strict=True):
        assert abs(row["score"] - reference.answer(text).score) < 1e-6


@pytest.fixture
def longrope(model: Path, tmp_path: Path) -> Path:
    """`model` with other position encodings for texts of more than 100 tokens."""
    twin = shutil.copytree(model, tmp_path / "longrope")
    config = json.loads((twin / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5 + number for number in range(8)],
        "original_max_position_embeddings": 100,
        "factor": 20.0,
    }
    (twin / "config.json").write_text(json.dumps(config))
    return twin


STORY = "A fox and a dog walked along a river. " * 6


def test_prompts_longer_than_the_length_where_positions_change_are_scored(longrope: Path) -> None:
    """Rows of the same text and of others, on both sides of it; transformers reads each row by itself."""
    prompts = [STORY[:length] + "?" for length in range(90, 220, 9)] + texts(5)
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, "hf.parquet", model=longrope, engine="hf")["exit_code"] == 0
    assert score(source, model=longrope, pack_tokens=150)["exit_code"] == 0
    rows, others = read_output("out.parquet"), read_output("hf.parquet")
    lengths = [row["prompt_tokens"] for row in rows]
    assert min(lengths) < 100 < max(lengths)
    for row, other in zip(rows, others, strict=True):
        assert abs(row["score"] - other["score"]) < EXACT


@pytest.mark.parametrize("labels", ["Yes,No", "Yes,No, the fox did"], ids=["kept", "again"])
def test_texts_are_written_on_both_sides_of_that_length(longrope: Path, labels: str) -> None:
    """A text ends at it if its prompt does not; transformers writes each by itself."""
    source = write_parquet("in.parquet", prompt=[STORY[:length] + "?" for length in range(95, 130, 2)])
    job = {"model": longrope, "labels": labels, "rationale": 4}
    assert score(source, "hf.parquet", engine="hf", **job)["exit_code"] == 0
    assert score(source, **job)["exit_code"] == 0
    rows, others = read_output("out.parquet"), read_output("hf.parquet")
    lengths = [row["prompt_tokens"] for row in rows]
    assert min(lengths) < 90 < 100 < max(lengths)
    for row, other in zip(rows, others, strict=True):
        assert abs(row["score"] - other["score"]) < EXACT
        assert (row["rationale"], row["finish_reason"]) == (other["rationale"], other["finish_reason"])
        if row["finish_reason"] == "length" and row["prompt_tokens"] > 100:
            assert row["rationale_tokens"] == 4


@pytest.mark.parametrize("options", [{}, {"rationale_temperature": 0.8, "rationale_seed": 3}], ids=["greedy", "drawn"])
def test_texts_do_not_depend_on_the_engine(model: Path, options: dict[str, Any]) -> None:
    """Not even drawn ones: `generate` takes the tokens that the same noise chooses."""
    source = write_parquet("in.parquet", prompt=texts(8), id=[f"row {number}" for number in range(8)])
    job = {"model": model, "id_column": "id", "rationale": 6, "rationale_when": "score < 0.9", **options}
    assert score(source, "torch.parquet", **job)["exit_code"] == 0
    assert score(source, engine="hf", **job)["exit_code"] == 0
    rows, others = read_output("out.parquet"), read_output("torch.parquet")
    assert any(row["rationale_tokens"] for row in rows)
    for row, other in zip(rows, others, strict=True):
        for name in ("rationale", "rationale_tokens", "finish_reason", "rationale_source"):
            assert row[name] == other[name]
        assert row["rationale_gap"] == pytest.approx(other["rationale_gap"], abs=1e-4)


@pytest.mark.parametrize(("engine", "function"), [("fake", "tests.unit.engines.fake.logprobs"),
                                                  ("hf", "prefillcli.engines.hf.last_logits")])  # fmt: skip
def test_a_stopped_run_goes_on_with_the_rows_that_are_left(
    model: Path, monkeypatch: pytest.MonkeyPatch, engine: str, function: str
) -> None:
    flush_often(monkeypatch)
    source = write_parquet("in.parquet", prompt=texts(30))
    score(source, "whole.parquet", model=model, engine=engine)
    module, _, name = function.rpartition(".")
    answer, calls = getattr(sys.modules[module], name), 0

    def stopping(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise Interrupted(signal.SIGTERM)
        return answer(*arguments)

    monkeypatch.setattr(function, stopping)
    assert score(source, model=model, engine=engine)["exit_code"] == 143
    scored = read_report()["rows"]["scored"]
    assert scored >= 9
    summary = score(source, model=model, engine=engine, resume=True)
    assert (summary["exit_code"], summary["rows"]["scored"]) == (0, 30)
    assert calls == 11 + 30 - scored, "what is done is not computed again"
    rows, whole = read_output("out.parquet"), read_output("whole.parquet")
    for row in rows + whole:
        del row["seconds"]
    assert rows == whole


def test_another_engine_is_another_job(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_parquet("in.parquet", prompt=texts(4))
    assert score(source, model=model, engine="hf")["exit_code"] == 0
    capsys.readouterr()
    eager = {"engine": "hf", "engine_options": {"attn_implementation": "eager"}}
    for other in ({}, {"engine": "fake"}, eager):
        assert score(source, model=model, resume=True, **other)["exit_code"] == 4
        message = capsys.readouterr().err.splitlines()[0]
        assert "engine" in message.partition("belongs to another job: different ")[2]
    assert score(source, model=model, engine="hf", resume=True)["exit_code"] == 0


def test_a_signal_stops_the_plain_loop_between_two_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.engines import hf

    last_logits, calls = hf.last_logits, 0

    def signalled(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return last_logits(*arguments)

    monkeypatch.setattr(hf, "last_logits", signalled)
    summary = score(write_parquet("in.parquet", prompt=texts(30)), model=model, engine="hf")
    assert summary["exit_code"] == 143
    assert summary["rows"]["scored"] == 5


def test_an_engine_that_dies_ends_the_run_and_its_answers_are_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs, calls = fake.logprobs, 0

    def dying(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise ResourceError("it has died")
        return logprobs(*arguments)

    monkeypatch.setattr(fake, "logprobs", dying)
    source = write_parquet("in.parquet", prompt=texts(20))
    summary = score(source, model=model, engine="fake")
    assert (summary["exit_code"], summary["rows"]["scored"], summary["error"]) == (5, 6, "it has died")
    assert score(source, model=model, engine="fake", resume=True)["rows"]["scored"] == 20


def test_the_command_needs_no_torch_with_an_engine_that_needs_none(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(9))
    code = (
        "import sys\n"
        "from tests.unit.engines import fake\n"
        "from prefillcli.options.engines import ENGINES\n"
        "ENGINES['fake'] = fake.KIND\n"
        "from prefillcli.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers'} & sys.modules.keys()\n"
        "    if heavy:\n        sys.exit(f'imported: {heavy}')\n"
    )
    command = [sys.executable, "-c", code, "score", "in.parquet", "-m", str(model), "--engine", "fake", "-q"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    )
    assert done.returncode == 0, done.stderr
    assert len(read_output("in.scores.parquet")) == 9


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=24).map(lambda ids: np.asarray(ids, dtype=np.int32)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 40),
    st.sampled_from(["prefix-tree", "fifo"]),
)
def test_the_sequences_of_a_plan_are_its_prompts(prompts: list[np.ndarray], tokens: int, schedule: str) -> None:
    found = [each for pack in make_plan(prompts, Limits(tokens, 1000), schedule).packs for each in sequences(pack)]
    assert sorted(number for number, _ in found) == list(range(len(prompts)))
    assert all(np.array_equal(own, prompts[number]) for number, own in found)
    if schedule == "prefix-tree":
        assert [own.tolist() for _, own in found] == sorted(own.tolist() for own in prompts)


#: Two jobs hold them all.
FLAGS: list[dict[str, Any]] = [
    {"return_dict": False, "output_hidden_states": True, "use_cache": False, "gradient_checkpointing": True},
    {"output_attentions": True, "torchscript": True, "pad_token_id": -1},
]


@pytest.mark.parametrize("what", ["decoder", "hf", "streamed", "head", "encoder"])
def test_flags_of_training_in_a_configuration_do_not_matter(what: str, tmp_path: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt": "a fox"}, {"prompt": "the quick brown dog is a fox"}])
    options = {"hf": {"engine": "hf"}, "streamed": {"weights": "stream"}}.get(what, {})
    if what == "encoder":
        model = save_encoder(tmp_path / "model", num_labels=2)
    else:
        sizes: dict[str, Any] = {"num_labels": 2} if what == "head" else {}
        model = save_model(tmp_path / "model", classifies=what == "head", **sizes)
    plain = json.loads((model / "config.json").read_text())
    found = []
    for flags in ({}, *FLAGS):
        (model / "config.json").write_text(json.dumps(plain | flags))
        done = score(source, model=model, overwrite=True, **options)
        assert done["exit_code"] == 0, (flags, done)
        found.append([row["score"] for row in read_output("out.parquet")])
    assert all(each == found[0] for each in found)
