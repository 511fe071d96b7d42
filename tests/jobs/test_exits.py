"""Rows that leave early: the same answers for less work, each time the same rows, and none where nothing is proven."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefillcli.core.scorer import Granularity
from prefillcli.engines.base import PLAIN
from prefillcli.errors import UsageError
from prefillcli.models.files import sample_model
from prefillcli.options.commands import MergeSettings, ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.exits import learning as exit_learning
from prefillcli.reading.exits import proof as exit_proof
from prefillcli.reading.exits.exits import Exits
from prefillcli.reading.exits.full_rows import FullRows
from prefillcli.reading.exits.policy import ExitPolicy
from prefillcli.reading.exits.report import ExitUse, QuestionExits, provable_flips, provable_text
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.output.tallies import AuditedExits, Counts
from prefillcli.rows.proof import sealed_text
from prefillcli.tools.merge import merge_job
from prefillcli.walk.narrow import int8_kernel
from tests.jobs import jobs
from tests.jobs.jobs import read_output, read_report, score, write_jsonl
from tests.jobs.models import save_model

WORDS = ("fox", "dog", "brown", "quick", "number", "saw", "yes", "no")
ROWS = 360
LAYERS = 6
FLIPS = 0.1  # proven by 29 rows of an answer, or 46 with one flip
NAMES = ("n", "t")
LABELS = "n=n,t=t"  # without the space that this tokenizer makes a token of its own
EXITS: dict[str, Any] = {"exit": True, "max_flips": FLIPS, "exit_rows": 200, "labels": LABELS, "dtype": "float32"}


def prompts(rows: int = ROWS) -> list[str]:
    """Texts that share a beginning with some others."""
    draws = np.random.default_rng(7)
    heads = [" ".join(draws.choice(WORDS, 12)) for _ in range(rows // 20)]
    return [f"{draws.choice(heads)} {' '.join(draws.choice(WORDS, 8))} {row}\nAnswer:" for row in range(rows)]


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last layers change little: the answer is nearly there after the third of six."""
    path = save_model(tmp_path_factory.mktemp("models") / "deep", layers=LAYERS, seed=5)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", [{"prompt": text} for text in prompts()])


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "granularity", Granularity(batch_rows=64, window_rows=64))


@pytest.fixture(scope="session")
def in_full(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a job without exits."""
    output = tmp_path_factory.mktemp("full") / "full.jsonl"
    assert score(data, output, model=deep_model, labels=LABELS, dtype="float32")["status"] == "complete"
    return read_output(output)


@pytest.fixture(scope="session")
def exited(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with exits: `out.jsonl` and what lies beside it."""
    folder = tmp_path_factory.mktemp("exited")
    assert score(data, folder / "out.jsonl", model=deep_model, **EXITS)["status"] == "complete"
    return folder


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def stop_in_the_third_window(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
    """Score to `out.jsonl`, and stop before the third part is written."""
    write, windows = Sink.write, []

    def stop_in_the_third(sink: Sink, window: Any, *args: Any, **kwargs: Any) -> None:
        windows.append(window.index)
        if len(windows) == 3:
            raise KeyboardInterrupt
        write(sink, window, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "write", stop_in_the_third)
        assert score(data, "out.jsonl", model=model, **EXITS | flags)["status"] != "complete"


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Two jobs let the same rows leave at the same layers, with the same answers."""
    for row, other in zip(rows, others, strict=True):
        for name in ("exit_layer", "method", "prediction", "error"):
            assert row[name] == other[name], row
        assert row["score"] == pytest.approx(other["score"], abs=1e-5)


def test_most_rows_leave_and_keep_their_answers(exited: Path, in_full: list[dict[str, Any]]) -> None:
    rows = read_output(exited / "out.jsonl")
    left = [row for row in rows if row["exit_layer"] is not None]
    assert len(left) > (ROWS - EXITS["exit_rows"] // 1) / 2
    for row, full in zip(rows, in_full, strict=True):
        if row["exit_layer"] is None:
            assert row["method"] == "full"
            assert row["score"] == pytest.approx(full["score"], abs=1e-5)
            assert row["label_mass"] == pytest.approx(full["label_mass"], rel=1e-4)
        else:
            assert row["method"] == "early-exit"
            assert 1 <= row["exit_layer"] < LAYERS
            assert row["label_mass"] is row["logprob_n"] is None
            assert row["score"] == pytest.approx(full["score"], abs=0.25)
    for label in NAMES:
        own = [(row, full) for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert len(own) > ROWS / 10
        assert sum(row["prediction"] != label for row, _ in own) <= FLIPS * len(own)


def test_the_report_says_what_left_where(exited: Path) -> None:
    report, rows = read_report(exited / "out.run.json"), read_output(exited / "out.jsonl")
    exits = report["exits"]
    own = exits["questions"]["answer"]
    left = [row for row in rows if row["exit_layer"] is not None]
    assert report["methods"]["early-exit"] == len(left)
    assert report["tokens"]["skipped"] > 0
    assert exits["status"] == "learnt"
    assert exits["rows_in_full"] == ROWS // 2 == sum(each["fitted"] + each["judged"] for each in own["classes"])
    assert {int(name) for name in exits["by_layer"] if name != "full"} == {row["exit_layer"] for row in left}
    assert own["predicted_gain"] > 1
    assert exits["layers_gain"] > 1
    assert exits["measured_gain"] > 0
    for each in own["layers"]:
        here = sum(row["exit_layer"] == each["layer"] for row in left)
        assert (each["rows"], each["share"]) == (here, pytest.approx(here / (ROWS - exits["learnt_rows"])))
    tokens = report["tokens"]
    assert tokens["prompt"] == tokens["kept"] == sum(row["prompt_tokens"] for row in rows)
    assert tokens["unique"] <= tokens["computed"] == sum(row["computed_tokens"] for row in rows)


def test_an_evaluation_of_three_labels_has_the_rows_that_left(data: Path, deep_model: Path) -> None:
    answered = [{"prompt": text, "truth": "n"} for text in prompts()]
    given = EXITS | {
        "labels": "n=n,t=t,o=o",
        "truth": "truth",
        "max_flips": 0.4,
        "exit_rows": 180,
        "label_values": "3,1,-2",
    }
    assert score(write_jsonl("answered.jsonl", answered), "out.jsonl", model=deep_model, **given)["exit_code"] == 0
    rows, found = read_output("out.jsonl"), read_report("out.run.json")["evaluations"]["answer"]
    assert sum(row["exit_layer"] is not None for row in rows) > ROWS / 10
    assert found["rows"] == ROWS
    assert found["accuracy"]["value"] == pytest.approx(np.mean([row["prediction"] == "n" for row in rows]))
    for row in rows:
        assert sum(row[f"score_{label}"] for label in "nto") == pytest.approx(1)
        assert row["mean"] == pytest.approx(3 * row["score_n"] + row["score_t"] - 2 * row["score_o"])


def test_a_stopped_job_goes_on_with_the_same_exits(
    exited: Path, data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_the_third_window(data, deep_model, monkeypatch)
    learnt = Path("out.jsonl.prefill/exits.json").read_bytes()
    monkeypatch.setattr(exit_learning.ExitLearning, "learn", lambda _: pytest.fail("they are learnt once"))
    assert score(data, "out.jsonl", model=deep_model, resume=True, **EXITS)["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(exited / "out.jsonl"))
    profile = json.loads((exited / "out.exit.json").read_text())
    assert json.loads(learnt)["profile"] == {name: profile[name] for name in profile if name != "checksum"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "flags",
    [
        {"workers": 2},
        {"weights": "stream", "pack_tokens": 400, "prefix_kv": "discard", "chunk_tokens": 64},
    ],
    ids=["workers", "small packs, streamed"],
)
def test_how_rows_are_computed_changes_no_exit(
    exited: Path, data: Path, deep_model: Path, flags: dict[str, Any]
) -> None:
    assert score(data, "out.jsonl", model=deep_model, **flags, **EXITS)["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(exited / "out.jsonl"))


def test_audited_rows_are_read_to_the_end_and_say_what_they_would_have_left_with(
    exited: Path, data: Path, deep_model: Path, in_full: list[dict[str, Any]]
) -> None:
    assert score(data, "out.jsonl", model=deep_model, audit=60, **EXITS)["status"] == "complete"
    rows = read_output("out.jsonl")
    assert_same(rows, read_output(exited / "out.jsonl"))
    audited = [(row, full) for row, full in zip(rows, in_full, strict=True) if row["audit_score"] is not None]
    assert 40 < len(audited) <= 60
    assert any(row["exit_layer"] for row, _ in audited)
    for row, full in audited:
        assert row["audit_score"] == pytest.approx(full["score"], abs=1e-5)
        assert row["audit_prediction"] == full["prediction"]
    report = read_report()
    assert report["audits"]["answer"]["rows"] == len(audited)
    flips = {
        label: sum(row["prediction"] != label for row, full in audited if full["prediction"] == label)
        for label in NAMES
    }
    assert {each["label"]: each["flips"] for each in report["exits"]["questions"]["answer"]["audited"]} == flips


def test_a_profile_is_used_again_after_a_check(exited: Path, deep_model: Path, tmp_path: Path) -> None:
    tonight = write_jsonl("tonight.jsonl", [{"prompt": text.replace("fox", "dog")} for text in prompts(100)])
    flags = EXITS | {"exit_rows": 40}
    assert score(tonight, model=deep_model, exit_profile=exited / "out.exit.json", **flags)["status"] == "complete"
    exits = read_report()["exits"]
    assert (exits["status"], exits["rows_in_full"]) == ("reused", 40)
    learnt = json.loads((exited / "out.exit.json").read_text())
    assert [each["layer"] - 1 for each in exits["questions"]["answer"]["layers"]] == [
        each["layer"] for each in learnt["questions"][0]["exits"]
    ]
    assert sum(row["exit_layer"] is not None for row in read_output("out.parquet")) > 30
    assert not Path("out.exit.json").exists()


def test_a_profile_that_fails_its_check_is_not_used(
    exited: Path, data: Path, deep_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = json.loads((exited / "out.exit.json").read_text())
    for each in learnt["questions"][0]["exits"]:
        bias = each["probe"]["bias"]
        bias["float32"] = base64.b64encode(np.array([9, 0], "<f4").tobytes()).decode()
    del learnt["checksum"]
    Path("wrong.json").write_text(sealed_text(json.dumps(learnt)))
    assert score(data, model=deep_model, exit_profile="wrong.json", **EXITS)["status"] == "complete"
    exits = read_report()["exits"]
    assert exits["status"] == "none"
    assert "'t' flip" in exits["reason"]
    assert f"--exit: {exits['reason']}; all rows are read in full" in capsys.readouterr().err
    assert {row["method"] for row in read_output("out.parquet")} == {"full"}


def test_a_profile_of_another_job_is_refused(
    exited: Path, data: Path, model: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = "prefillcli.scoring.scorer.load_models"
    monkeypatch.setattr(loading, lambda *_, **__: pytest.fail("the weights are loaded"))
    profile = exited / "out.exit.json"
    other_model = score(data, model=model, exit_profile=profile, **EXITS)
    assert (other_model["exit_code"], "different model" in other_model["error"]) == (2, True)
    other_labels = score(data, model=deep_model, exit_profile=profile, **(EXITS | {"labels": "a=a,b=b"}))
    assert (other_labels["exit_code"], "different labels" in other_labels["error"]) == (2, True)
    stricter = score(data, model=deep_model, exit_profile=profile, **(EXITS | {"max_flips": 0.01}))
    assert (stricter["exit_code"], "--max-flips" in stricter["error"]) == (2, True)
    missing = score(data, model=deep_model, exit_profile="none.json", **EXITS)
    assert (missing["exit_code"], "no such file" in missing["error"]) == (2, True)
    Path("note.json").write_text('{"a": 1}')
    note = score(data, model=deep_model, exit_profile="note.json", **EXITS)
    assert (note["exit_code"], "it is not an exit profile" in note["error"]) == (2, True)


def test_too_few_rows_prove_nothing(deep_model: Path, in_full: list[dict[str, Any]]) -> None:
    few = write_jsonl("few.jsonl", [{"prompt": text} for text in prompts()[:30]])
    assert score(few, model=deep_model, **EXITS)["status"] == "complete"
    rows, exits = read_output("out.parquet"), read_report()["exits"]
    assert exits["status"] == "none"
    assert "learning rows" in exits["reason"]
    assert {row["method"] for row in rows} == {"full"}
    for row, full in zip(rows, in_full, strict=False):
        assert row["score"] == pytest.approx(full["score"], abs=1e-5)


def test_one_row_and_no_row_are_scored(deep_model: Path) -> None:
    for count in (1, 0):
        rows = write_jsonl(f"{count}.jsonl", [{"prompt": text} for text in prompts()[:count]])
        done = score(rows, f"{count}.parquet", model=deep_model, skip_empty=True, **EXITS)
        assert done["status"] == "complete"
        assert len(read_output(f"{count}.parquet")) == count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_damaged_exits_are_learnt_again(
    exited: Path,
    data: Path,
    deep_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    stop_in_the_third_window(data, deep_model, monkeypatch)
    file = Path("out.jsonl.prefill/exits.json")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    assert score(data, "out.jsonl", model=deep_model, resume=True, **EXITS)["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(exited / "out.jsonl"))
    assert "exits.json is gone or damaged: the exits are learnt again, from the same rows" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("learnt", ["there", "gone"])
def test_exits_that_drift_has_ended_stay_ended(
    data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch, learnt: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            "prefillcli.reading.exits.exits.drifted_classes", lambda counts, max_flips: (0,) if counts else ()
        )
        stop_in_the_third_window(data, deep_model, monkeypatch, audit=60)
    if learnt == "gone":
        Path("out.jsonl.prefill/exits.json").unlink()
    assert score(data, "out.jsonl", model=deep_model, resume=True, audit=60, **EXITS)["status"] == "complete"
    exits = read_report()["exits"]
    assert (exits["status"], exits["stopped_window"]) == ("stopped", 1)
    left = [row["row"] for row in read_output("out.jsonl") if row["exit_layer"] is not None]
    assert left
    assert max(left) < 64  # the rows of the first window


def test_a_run_that_only_writes_the_output_reports_its_exits_too(
    exited: Path, data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Sink, "finish", interrupted)
        assert score(data, "out.jsonl", model=deep_model, **EXITS)["status"] != "complete"
    assert score(data, "out.jsonl", model=deep_model, resume=True, **EXITS)["status"] == "complete"
    found, whole = read_report()["exits"], read_report(exited / "out.run.json")["exits"]
    assert found["by_layer"] == whole["by_layer"]
    assert found["questions"] == whole["questions"]


@pytest.mark.parametrize("flags", [{"exit": True}, {"exit": False, "first": "words"}])
def test_an_engine_that_has_no_exits_refuses_them(data: Path, deep_model: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the hf engine"):
        score(data, model=deep_model, engine="hf", **(EXITS | flags))


class Kept(SimpleNamespace):
    """A sink that keeps in memory what is settled."""

    def settle(self, settled: dict[str, Any]) -> None:
        self.settled = settled


def job_with(sink: Kept) -> Any:
    return SimpleNamespace(sink=sink)


def use_of(*questions: str, **more: Any) -> ExitUse:
    own = {name: QuestionExits(status="learnt") for name in questions}
    return ExitUse(status="learnt", max_flips=FLIPS, model_layers=4, questions=own, **more)


def at_work(policies: dict[int, ExitPolicy], use: ExitUse) -> Any:
    """The exits of a job that has learnt these."""
    settings = ScoreSettings.of({"inputs": ("rows",), "exit": True})
    exits = Exits(settings.exits, settings.flips)
    exits.policies, exits.use = policies, use
    return exits


def test_drift_ends_the_exits(capsys: pytest.CaptureFixture[str]) -> None:
    audited = {"t": AuditedExits(200, 150, 2), "n": AuditedExits(90, 80, 40)}
    sink = Kept(settled={"exits": {"digest": "of the file"}}, counts=Counts(audited_exits={"answer": audited}))
    exits = at_work({0: ExitPolicy(())}, use_of("answer"))
    exits.window_written(job_with(sink), window=4)
    assert not exits.policies
    assert exits.treatment({}, frozenset()) == PLAIN
    assert sink.settled["exits"]["ended"]["answer"]["stopped_window"] == 5
    assert "40 of 90 audited rows that are 'n'" in capsys.readouterr().err


@pytest.mark.parametrize("flips_of", ["each", "all"])
def test_where_all_rows_are_bounded_together_their_audit_is_one_test(flips_of: Any) -> None:
    use = use_of("answer", flips_of=flips_of)
    audited = {"t": AuditedExits(300, 150, 0), "n": AuditedExits(30, 30, 9)}
    few = Kept(settled={"exits": {}}, counts=Counts(audited_exits={"answer": audited}))
    exits = at_work({0: ExitPolicy(())}, use.model_copy())
    exits.window_written(job_with(few), window=4)
    assert (not exits.policies) == (flips_of == "each")
    audited = {"t": AuditedExits(190, 150, 40), "n": AuditedExits(190, 150, 40)}
    many = Kept(settled={"exits": {}}, counts=Counts(audited_exits={"answer": audited}))
    exits = at_work({0: ExitPolicy(())}, use.model_copy())
    exits.window_written(job_with(many), window=4)
    assert not exits.policies
    assert ("80 of 380 audited rows have flipped" in (exits.use.reason or "")) == (flips_of == "all")


def test_the_flips_of_all_rows_are_bounded_together(
    data: Path, deep_model: Path, in_full: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = EXITS | {"flips_of": "all", "exit_rows": 100}
    assert score(data, "out.jsonl", model=deep_model, quiet=False, workers=2, **flags)["status"] == "complete"
    assert "50. Without a flip, that many prove at most 5.82% flips" in capsys.readouterr().err
    rows, exits = read_output("out.jsonl"), read_report()["exits"]
    assert (exits["status"], exits["flips_of"], exits["provable"]["judged"]) == ("learnt", "all", 50)
    assert [(each["label"], each["judged"]) for each in exits["questions"]["answer"]["classes"]] == [("all rows", 50)]
    assert set(exits["questions"]["answer"]["layers"][0]["thresholds"]) == set(NAMES)
    assert sum(row["exit_layer"] is not None for row in rows) > ROWS / 4
    flips = sum(row["prediction"] != full["prediction"] for row, full in zip(rows, in_full, strict=True))
    assert flips <= FLIPS * ROWS
    given = {"exit_profile": "out.exit.json", "exit_rows": 40}
    refused = score(data, "again.jsonl", model=deep_model, **(EXITS | given))
    assert (refused["exit_code"], "learnt with flips_of=all, not each" in refused["error"]) == (2, True)
    again = score(data, "again.jsonl", model=deep_model, **(flags | given))
    assert again["status"] == "complete"
    assert read_report("again.run.json")["exits"]["status"] == "reused"


COMPRESSED: dict[str, Any] = {"keep": 0.5, "keep_last": 16, "keep_first": 1, "select_chunk": 4, "compress_above": 0}


@pytest.fixture(scope="module")
def compressed(data: Path, deep_model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with exits, an audit and compressed prompts."""
    folder, flags = tmp_path_factory.mktemp("compressed"), EXITS | COMPRESSED | {"draft": draft, "audit": 50}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "granularity", Granularity(batch_rows=64, window_rows=64))
        assert score(data, folder / "out.jsonl", model=deep_model, **flags)["status"] == "complete"
    return folder


def test_compressed_rows_leave_too(compressed: Path, data: Path, deep_model: Path, draft: Path) -> None:
    kept = {"labels": LABELS, "dtype": "float32", "draft": draft, **COMPRESSED}
    assert score(data, "plain.jsonl", model=deep_model, **kept)["status"] == "complete"
    plain, rows = read_output("plain.jsonl"), read_output(compressed / "out.jsonl")
    assert {row["method"] for row in rows} >= {"specprefill", "specprefill+early-exit"}
    for row, other in zip(rows, plain, strict=True):
        assert row["kept_tokens"] == other["kept_tokens"]
        if row["exit_layer"] is None:
            assert row["score"] == pytest.approx(other["score"], abs=1e-5)
    flips = sum(row["prediction"] != other["prediction"] for row, other in zip(rows, plain, strict=True))
    assert flips <= FLIPS * ROWS
    audited = [row for row in rows if row["audit_score"] is not None]
    assert len(audited) == 50


def test_a_profile_is_of_one_way_to_compress_and_of_any_audit(
    compressed: Path, data: Path, deep_model: Path, draft: Path
) -> None:
    flags = EXITS | COMPRESSED | {"draft": draft, "exit_profile": compressed / "out.exit.json", "exit_rows": 40}
    assert score(data, "out.jsonl", model=deep_model, audit=20, **flags)["status"] == "complete"
    other = score(data, "other.jsonl", model=deep_model, **(flags | {"keep": 0.4}))
    assert (other["exit_code"], "different prompt settings" in other["error"]) == (2, True)


def test_shards_with_a_profile_are_merged(exited: Path, data: Path, deep_model: Path) -> None:
    flags = EXITS | {"exit_profile": exited / "out.exit.json", "exit_rows": 40}
    assert score(data, "whole.jsonl", model=deep_model, **flags)["status"] == "complete"
    for shard in ("1/2", "2/2"):
        assert score(data, "out.jsonl", model=deep_model, shard=shard, **flags)["status"] == "complete"
    assert merge_job(load_settings(MergeSettings, {"output": "out.jsonl"}, environment={}))["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output("whole.jsonl"))
    merged, whole = read_report()["exits"], read_report("whole.run.json")["exits"]
    for name in ("status", "max_flips", "questions", "by_layer"):
        assert merged[name] == whole[name]
    assert score(data, "whole.jsonl", model=deep_model, resume=True, **flags)["status"] == "complete"
    assert read_report("whole.run.json")["exits"]["by_layer"] == whole["by_layer"]


def test_where_layers_do_not_know_the_answer_no_row_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "granularity", Granularity())
    monkeypatch.setattr(exit_learning, "observed_layers", lambda layers: (0, 1))
    rows = Path(__file__).parents[2] / "samples/labeling.parquet"
    flags = {"limit": 500, "exit": True, "max_flips": 0.05, "exit_rows": 250}
    assert score(rows, model=sample_model(), **flags)["status"] == "complete"
    exits = read_report()["exits"]
    assert (
        min(each["judged"] for each in exits["questions"]["answer"]["classes"]) >= 59
    )  # as many as prove 5 % without a flip
    assert exits["status"] == "none"
    assert "no exit would save work" in exits["reason"]
    assert {row["method"] for row in read_output("out.parquet")} == {"full"}


def test_where_an_answer_is_rare_more_rows_are_read(data: Path, deep_model: Path) -> None:
    flags = {name: value for name, value in EXITS.items() if name != "exit_rows"} | {"max_flips": 0.2}
    assert score(data, model=deep_model, **flags)["status"] == "complete"
    exits = read_report()["exits"]
    asked = exit_proof.rows_to_learn(0.2, classes=2)
    assert asked < exits["rows_in_full"] <= ROWS / 2
    # With one flip, 20 % take 22 judged rows of an answer.
    assert min(each["judged"] for each in exits["questions"]["answer"]["classes"]) >= 22


@pytest.mark.parametrize(
    ("counts", "most", "rows"),
    [
        ((1300, 1300), 10_000, 2600),  # enough
        ((1000, 200), 10_000, 7095),  # 473 judged rows with one flip, as many that fit, and a quarter more
        ((1000, 200), 4_000, 4_000),
        ((1000, 200), 3_000, 1200),  # 299 judged rows without a flip would take 3,588
        ((1200, 0), 10_000, 1200),  # no number of rows will do
    ],
)
def test_how_many_rows_a_rare_answer_takes(counts: tuple[int, int], most: int, rows: int) -> None:
    assert exit_proof.rows_for_rarest(np.array(counts), 0.01, most) == rows


def test_a_job_says_before_it_learns_what_its_rows_can_prove(
    deep_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = write_jsonl("few.jsonl", [{"prompt": text} for text in prompts()[:80]])
    flags = {name: value for name, value in EXITS.items() if name != "exit_rows"} | {"max_flips": 0.02}
    assert score(few, model=deep_model, quiet=False, **flags)["status"] == "complete"
    said = capsys.readouterr().err
    smallest = 1 - 0.05 ** (1 / 10)  # no flip among ten rows
    assert read_report()["exits"]["provable"] == {
        "rows": 40,
        "judged": 10,
        "max_flips": pytest.approx(smallest),
        "rows_needed": 149,
    }
    text = (
        "--exit reads 40 rows in full first, and half of them judge: 10 of each of 2 answers, if these are equally "
        f"frequent. Without a flip, that many prove at most {smallest:.2%} flips. --max-flips 0.02 takes 149 of each, "
        "596 rows of a job of twice as many; the smallest --max-flips that may be proven here is 0.2589"
    )
    assert text in said
    assert said.index(text) < said.index("rows are read in full first")


def test_no_row_can_prove_nothing_and_enough_rows_are_enough() -> None:
    nothing = provable_flips(0, 0.01, 2)
    assert (nothing.judged, nothing.max_flips) == (0, 1.0)
    assert provable_text(nothing, 2, 0.01).endswith("1,196 rows of a job of twice as many")
    enough = provable_flips(1196, 0.01, 2)
    assert enough.max_flips <= 0.01 < provable_flips(1195, 0.01, 2).max_flips
    assert provable_text(enough, 2, 0.01).endswith("prove at most 1.00% flips")


def test_rows_with_longer_labels_leave_by_the_first_tokens_that_differ(deep_model: Path) -> None:
    write_jsonl("in.jsonl", [{"prompt": prompt} for prompt in prompts()])
    labels = {"labels": "n=n fox,t=t dog", "label_norm": "tokens"}
    score("in.jsonl", "full.jsonl", model=deep_model, dtype="float32", **labels)
    found = score("in.jsonl", "out.jsonl", model=deep_model, **EXITS | labels)
    assert found["exit_code"] == 0, found
    rows = list(zip(read_output("full.jsonl"), read_output("out.jsonl"), strict=True))
    for full, own in rows:
        if own["exit_layer"] is None:
            assert own["score"] == pytest.approx(full["score"], abs=1e-5)
    left = [(full["prediction"], own["prediction"]) for full, own in rows if own["exit_layer"] is not None]
    assert len(left) > ROWS / 8
    assert sum(full != own for full, own in left) <= FLIPS * len(left)


def test_labels_that_begin_with_the_same_token_leave_too(deep_model: Path) -> None:
    write_jsonl("in.jsonl", [{"prompt": prompt} for prompt in prompts()])
    labels = {"labels": "fox n=n n,fox t=n t", "label_norm": "tokens"}
    score("in.jsonl", "full.jsonl", model=deep_model, dtype="float32", **labels)
    found = score("in.jsonl", "out.jsonl", model=deep_model, **EXITS | labels)
    assert found["exit_code"] == 0, found
    both = list(zip(read_output("full.jsonl"), read_output("out.jsonl"), strict=True))
    left = [(full["prediction"], own["prediction"]) for full, own in both if own["exit_layer"] is not None]
    assert len(left) > 10
    assert sum(full != own for full, own in left) <= FLIPS * ROWS / 2


# Several questions: each leaves when it is decided, the row when all have.

ASKED = {"fox": ("n=n", "t=t"), "dog": ("n=n", "t=t", "o=o"), "number": ("n=n", "t=t")}


def write_questions(names: Sequence[str] = tuple(ASKED), **last: Any) -> dict[str, Any]:
    """The options of a job with these questions, which share a beginning; `last` are fields of the last one."""
    entries = [{"name": name, "text": f" {name}?\nAnswer:", "labels": list(ASKED[name])} for name in names]
    entries[-1] |= last
    file = Path("questions.json")
    file.write_text(json.dumps({"document": "{{ prompt }}", "questions": entries}))
    given = {name: value for name, value in EXITS.items() if name != "labels"}
    return given | {"questions": file, "flips_of": "all"}


def answers_of(rows: list[dict[str, Any]], name: str) -> list[Any]:
    probabilities = f"{name}.probabilities"
    if probabilities in rows[0]:
        return [max(row[probabilities], key=row[probabilities].get) for row in rows]
    return [row[name] > 0.5 for row in rows]


@pytest.fixture(scope="module")
def several(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with three questions, `full.jsonl` without exits and `out.jsonl` with them."""
    folder = tmp_path_factory.mktemp("several")
    with contextlib.chdir(folder):
        given = write_questions()
        plain = {"questions": given["questions"], "dtype": "float32", "model": deep_model}
        assert score(data, "full.jsonl", **plain)["status"] == "complete"
        assert score(data, "out.jsonl", model=deep_model, audit=60, **given)["status"] == "complete"
    return folder


def test_each_question_leaves_when_it_is_decided(several: Path) -> None:
    rows, full = read_output(several / "out.jsonl"), read_output(several / "full.jsonl")
    exits = read_report(several / "out.run.json")["exits"]
    learnt = exits["learnt_rows"]
    for name in ASKED:
        left = [row[f"{name}.exit_layer"] is not None for row in rows]
        own = exits["questions"][name]
        assert sum(left) > (ROWS - learnt) / 4, own["reason"]
        assert sum(each["rows"] for layer, each in own["by_layer"].items() if layer != "full") == sum(left)
        said, wanted = answers_of(rows, name), answers_of(full, name)
        assert sum(one != other for one, other in zip(said, wanted, strict=True)) <= FLIPS * ROWS
        for row, whole in zip(rows, full, strict=True):
            assert (row[f"{name}.label_mass"] is None) == (row[f"{name}.exit_layer"] is not None)
            if row[f"{name}.exit_layer"] is None:
                assert row[f"{name}.label_mass"] == pytest.approx(whole[f"{name}.label_mass"], rel=1e-4)
        audited = [
            (row, whole) for row, whole in zip(rows, full, strict=True) if row[f"{name}.audit_score"] is not None
        ]
        assert 30 < len(audited) <= 60
        assert sum(each["rows"] for each in own["audited"]) == len(audited)
    for row in rows:
        gone = [row[f"{name}.exit_layer"] is not None for name in ASKED]
        assert (row["method"] == "early-exit") == all(gone)
    left = sum(row[f"{name}.exit_layer"] is not None for row in rows for name in ASKED)
    assert sum(each["rows"] for layer, each in exits["by_layer"].items() if layer != "full") == left
    assert exits["layers_saved"] > 0


def assert_same_answers(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row["method"] == other["method"]
        for name in ASKED:
            assert row[f"{name}.exit_layer"] == other[f"{name}.exit_layer"]
            assert row[name] == (pytest.approx(other[name], abs=1e-5) if name != "dog" else other[name])


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [{"workers": 2}, {"pack_tokens": 400, "chunk_tokens": 64}])
def test_how_several_questions_are_computed_changes_no_exit(
    several: Path, data: Path, deep_model: Path, flags: dict[str, Any]
) -> None:
    given = write_questions() | flags
    assert score(data, "out.jsonl", model=deep_model, audit=60, **given)["status"] == "complete"
    assert_same_answers(read_output("out.jsonl"), read_output(several / "out.jsonl"))


@pytest.mark.nightly
def test_a_stopped_job_with_several_questions_goes_on_and_another_night_takes_its_profile(
    several: Path, data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write_questions()
    with monkeypatch.context() as patch:
        patch.setattr(Sink, "finish", interrupted)
        assert score(data, "out.jsonl", model=deep_model, audit=60, **given)["status"] != "complete"
    with monkeypatch.context() as patch:
        patch.setattr(exit_learning.ExitLearning, "learn", lambda _: pytest.fail("they are learnt once"))
        assert score(data, "out.jsonl", model=deep_model, audit=60, resume=True, **given)["status"] == "complete"
    assert_same_answers(read_output("out.jsonl"), read_output(several / "out.jsonl"))
    night = given | {"exit_profile": several / "out.exit.json", "exit_rows": 40}
    assert score(data, "night.jsonl", model=deep_model, **night)["status"] == "complete"
    exits = read_report("night.run.json")["exits"]
    assert {each["status"] for each in exits["questions"].values()} == {"reused"}
    other = score(
        data,
        "other.jsonl",
        model=deep_model,
        **write_questions(("fox", "dog")) | {"exit_profile": night["exit_profile"]},
    )
    assert (other["exit_code"], "different prompt settings, questions" in other["error"]) == (2, True)


def test_words_decide_questions_ahead_of_the_model(data: Path, deep_model: Path) -> None:
    given = write_questions() | {"first": "words", "max_flips": 0.3, "audit": 40}
    assert score(data, "out.jsonl", model=deep_model, **given)["status"] == "complete"
    rows, exits = read_output("out.jsonl"), read_report()["exits"]
    (first,) = exits["first"]
    ahead = [sum(row[f"{name}.exit_layer"] == 0 for row in rows) for name in ASKED]
    assert first["rows"] == sum(ahead) > 0
    for row in rows:
        layers = [row[f"{name}.exit_layer"] for name in ASKED]
        assert (row["method"] == "first") == all(layer == 0 for layer in layers)
    assert exits["by_layer"]["0"]["rows"] == sum(ahead)
    assert "0 (by words)" in Path("out.run.html").read_text()


def test_a_question_that_depends_on_others_is_read_to_the_end(data: Path, deep_model: Path) -> None:
    given = write_questions(when="fox > 0.5")
    assert score(data, "out.jsonl", model=deep_model, **given)["status"] == "complete"
    rows, exits = read_output("out.jsonl"), read_report()["exits"]
    assert exits["questions"]["number"]["status"] == "none"
    assert "other answers" in exits["questions"]["number"]["reason"]
    assert any(row["fox.exit_layer"] is not None for row in rows)
    assert all(row["number.exit_layer"] is None for row in rows)
    assert all((row["number"] is not None) == (row["fox"] > 0.5) for row in rows)


def test_drift_ends_the_exits_of_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    audited = {"calm": {"t": AuditedExits(200, 150, 2)}, "wild": {"t": AuditedExits(90, 80, 40)}}
    sink = Kept(settled={"exits": {}}, counts=Counts(audited_exits=audited))
    exits = at_work({0: ExitPolicy(()), 1: ExitPolicy(())}, use_of("calm", "wild"))
    exits.window_written(job_with(sink), window=4)
    assert list(exits.policies) == [0]
    assert (exits.use.status, exits.use.questions["wild"].stopped_window) == ("learnt", 5)
    assert "--exit: question wild: 40 of 90" in capsys.readouterr().err
    sink.counts.audited_exits = {"calm": audited["wild"]}
    exits.use.questions["wild"].status = "none"
    exits.window_written(job_with(sink), window=5)
    assert not exits.policies
    assert (exits.use.status, exits.use.stopped_window) == ("stopped", 6)
    assert exits.use.reason == "no question has any left"


def test_what_several_prompts_of_a_question_would_flip_is_not_bounded(data: Path, deep_model: Path) -> None:
    Path("q.yaml").write_text("questions: [{name: mood, type: choice, instructions: Which one, choices: [n, t, o]}]")
    given = {name: value for name, value in EXITS.items() if name != "labels"}
    found = score(data, model=deep_model, questions="q.yaml", orders=2, **given)
    assert (found["exit_code"], "whose flips are not those of their mean" in found["error"]) == (2, True)


# A first model, which decides rows before the model reads them.

FIRST: dict[str, Any] = {name: value for name, value in EXITS.items() if name != "exit"}


@pytest.fixture(scope="session")
def shallow_model(deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first four layers of the deep model, which know the answer nearly as well."""
    path = tmp_path_factory.mktemp("models") / "shallow"
    model = AutoModelForCausalLM.from_pretrained(deep_model)
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(deep_model).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def cascaded(data: Path, deep_model: Path, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with a first model."""
    folder = tmp_path_factory.mktemp("cascaded")
    found = score(data, folder / "out.jsonl", model=deep_model, first=shallow_model, audit=60, **FIRST)
    assert found["status"] == "complete"
    return folder


def test_a_first_model_decides_rows_that_keep_their_answers(cascaded: Path, in_full: list[dict[str, Any]]) -> None:
    rows, report = read_output(cascaded / "out.jsonl"), read_report(cascaded / "out.run.json")
    decided = [row for row in rows if row["method"] == "first"]
    unread = [row for row in decided if row["audit_score"] is None]
    assert len(unread) > ROWS / 8
    assert len(decided) - len(unread) > 5  # audited: the model reads them all the same
    assert sum(row["audit_score"] is not None for row in rows) > 40
    for row, full in zip(rows, in_full, strict=True):
        assert (row["method"] == "first") == (row["exit_layer"] == 0) == (row["label_mass"] is None), row
        if row["method"] == "first":
            assert row["score"] == pytest.approx(full["score"], abs=0.25)
        else:
            assert row["score"] == pytest.approx(full["score"], abs=1e-5)
        if row["audit_score"] is not None:
            assert row["audit_score"] == pytest.approx(full["score"], abs=1e-5)
    assert all(row["computed_tokens"] == 0 for row in unread)
    for label in NAMES:
        own = [row for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert sum(row["prediction"] != label for row in own) <= FLIPS * len(own)
    exits = report["exits"]
    (first,) = exits["first"]
    assert (first["rows"], report["methods"]["first"]) == (len(decided), len(decided))
    assert exits["by_layer"]["0"]["rows"] == len(decided)
    assert first["cost"] > 0
    assert [each["layer"] for each in exits["questions"]["answer"]["layers"]] == [0]
    assert sum(each["left"] for each in exits["questions"]["answer"]["audited"]) == len(decided) - len(unread)
    assert report["tokens"]["draft"] > 0


def test_a_dry_run_says_what_a_first_model_may_save(
    data: Path, deep_model: Path, shallow_model: Path, cascaded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model": deep_model, "first": shallow_model, **FIRST, "dry_run": True, "quiet": False}
    assert score(data, "out.jsonl", **given)["status"] == "complete"
    report = read_report("out.dry-run.json")
    counted = []
    for path in (shallow_model, deep_model):
        model = AutoModelForCausalLM.from_pretrained(path)
        tokens = torch.zeros(1, round(report["survey"]["lengths"]["mean"]), dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, logits_to_keep=1, use_cache=False)
        counted.append(counter.get_total_flops())
    found = report["outlooks"]["exits"]
    assert found["first_cost"] == {str(shallow_model): pytest.approx(counted[0] / counted[1], rel=0.03)}
    (used,) = read_report(cascaded / "out.run.json")["exits"]["first"]
    assert used["cost"] == pytest.approx(counted[0] / counted[1], rel=0.03)
    assert "one that decides no larger share of the rows that it reads" in " ".join(capsys.readouterr().err.split())
    assert (found["rows_in_full"], found["provable"]["judged"], found["gain"]) == (ROWS // 2, 45, None)

    profile = cascaded / "out.exit.json"
    given |= {"exit_profile": profile, "exit_rows": 40}
    assert score(data, "out.jsonl", **given)["status"] == "complete"
    found = read_report("out.dry-run.json")["outlooks"]["exits"]
    learnt = json.loads(profile.read_text())["questions"][0]["findings"]
    assert (found["rows_in_full"], found["provable"]) == (40, None)
    assert found["leaving"] == {str(each["layer"] + 1): each["leaving"] for each in learnt["exits"]}
    assert found["gain"] == pytest.approx(ROWS / (40 + (ROWS - 40) / (learnt["gain"] or 1.0)))
    assert f"{found['gain']:.2f}x for tokens" in " ".join(capsys.readouterr().err.split())
    other = score(data, "out.jsonl", **given | {"labels": "n=n,q=q"})
    assert "different labels" in other["error"]


def test_on_a_busy_machine_the_same_is_learnt(
    data: Path, deep_model: Path, shallow_model: Path, cascaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says: here it runs faster and faster, so that the first model's seconds are the longest."""
    looks = itertools.count(1)
    monkeypatch.setattr("prefillcli.engines.torch.time", SimpleNamespace(monotonic=lambda: 1.5 ** next(looks)))
    assert score(data, "out.jsonl", model=deep_model, first=shallow_model, audit=60, **FIRST)["status"] == "complete"
    assert Path("out.exit.json").read_bytes() == (cascaded / "out.exit.json").read_bytes()
    assert_same(read_output("out.jsonl"), read_output(cascaded / "out.jsonl"))


def test_what_a_first_model_decides_follows_from_its_forward_and_the_profile(
    cascaded: Path, data: Path, shallow_model: Path
) -> None:
    (found,) = json.loads((cascaded / "out.exit.json").read_text())["questions"][0]["exits"]
    assert found["layer"] == -1
    arrays = {
        name: np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"]).astype(np.float64)
        for name, value in found["probe"].items()
        if name != "kind"
    }
    model = AutoModelForCausalLM.from_pretrained(shallow_model, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(shallow_model)
    thresholds = np.array([np.inf if each is None else each for each in found["thresholds"]])
    ids = [tokenizer.encode(label, add_special_tokens=False)[-1] for label in (" n", " t")]
    checked = 0
    for row, text in list(zip(read_output(cascaded / "out.jsonl"), prompts(), strict=True))[::5]:
        with torch.inference_mode():
            shown = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        if found["probe"]["kind"] == "ridge":
            inner = shown.hidden_states[-2][0, -1].double().numpy()
            logits = inner / np.linalg.norm(inner) @ arrays["weights"] + arrays["bias"]
        else:
            own = torch.log_softmax(shown.logits[0, -1].double(), -1)[ids].numpy()
            assert found["probe"]["kind"] == "affine"
            logits = (own - own.mean()) @ arrays["weights"] + arrays["bias"]
        share, ahead = 1 / (1 + np.exp(logits[1] - logits[0])), abs(logits[0] - logits[1])
        leaves = ahead - thresholds[int(logits.argmax())]
        if row["method"] == "first":
            assert leaves > -1e-4
            assert row["score"] == pytest.approx(share, abs=1e-5)
            checked += 1
    assert checked > 10


def test_a_stopped_job_with_a_first_model_goes_on_and_another_night_takes_its_profile(
    cascaded: Path, data: Path, deep_model: Path, shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"first": shallow_model, "audit": 60, "exit": False}
    stop_in_the_third_window(data, deep_model, monkeypatch, **given)
    with monkeypatch.context() as patch:
        patch.setattr(exit_learning.ExitLearning, "learn", lambda _: pytest.fail("they are learnt once"))
        resumed = score(data, "out.jsonl", model=deep_model, resume=True, **EXITS | given)
    assert resumed["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(cascaded / "out.jsonl"))
    profile = {"exit_profile": cascaded / "out.exit.json", "exit_rows": 40, **given}
    assert score(data, "again.jsonl", model=deep_model, **EXITS | profile)["status"] == "complete"
    assert read_report("again.run.json")["exits"]["status"] == "reused"
    assert sum(row["method"] == "first" for row in read_output("again.jsonl")) > ROWS / 4
    other = score(data, "other.jsonl", model=deep_model, **EXITS | profile | {"first": None, "exit": True})
    assert (other["exit_code"], "different prompt settings" in other["error"]) == (2, True)


def test_rows_that_are_too_long_for_the_first_model_go_to_the_model(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "samples"
    short = shutil.copytree(source / "models" / "draft", tmp_path / "short")
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 60}
    (short / "config.json").write_text(json.dumps(config))
    texts = pq.read_table(source / "labeling.parquet", columns=["prompt"])["prompt"].to_pylist()[:450]
    write_jsonl("in.jsonl", [{"prompt": text} for text in sorted(texts, key=len)])  # the last windows are all too long
    given = {"model": source / "models" / "deep", "dtype": "float32"}
    assert score("in.jsonl", "full.jsonl", **given)["exit_code"] == 0
    found = score("in.jsonl", "out.jsonl", first=short, max_flips=0.1, exit_rows=200, **given)
    assert (found["exit_code"], found["rows"]["scored"]) == (0, len(texts))
    pairs = list(zip(read_output("out.jsonl"), read_output("full.jsonl"), strict=True))
    assert sum(row["method"] == "first" for row, _ in pairs) > 70
    for row, full in pairs:
        if row["prompt_tokens"] > 60:
            assert (row["method"], row["score"]) == ("full", pytest.approx(full["score"], abs=1e-5))
    assert all(row["prompt_tokens"] > 60 for row, _ in pairs[-64:])


@pytest.mark.skipif(int8_kernel() is None, reason="no kernel here: torch's products in int8 take minutes")
def test_the_model_in_int8_reads_what_the_first_model_leaves(
    data: Path, deep_model: Path, tmp_path: Path, in_full: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda *_: 0.4)  # a processor that is made for int8
    other = save_model(tmp_path / "other", layers=2, seed=11)  # knows nothing, so it is not asked
    given = {"model": deep_model, "first": str(other), "compute": "int8", "audit": 60, **FIRST}
    assert score(data, "out.jsonl", **given)["status"] == "complete"
    rows, exits = read_output("out.jsonl"), read_report("out.run.json")["exits"]
    blind, narrow = exits["first"]
    assert [each["layer"] for each in exits["first"]] == [-1, 0]
    assert (narrow["model"], blind["rows"], blind["read_rows"]) == ("int8", 0, 0)
    assert narrow["rows"] == sum(row["exit_layer"] == 0 for row in rows) > ROWS / 8
    for label in NAMES:
        own = [row for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert sum(row["prediction"] != label for row in own) <= FLIPS * len(own)
    again = given | {"exit_profile": "out.exit.json", "exit_rows": 40}
    assert score(data, "again.jsonl", **again)["status"] == "complete"
    assert {row["exit_layer"] for row in read_output("again.jsonl")} >= {0}
    turned = score(data, "turned.jsonl", **again | {"compute": None})
    assert (turned["exit_code"], "different prompt settings" in turned["error"]) == (2, True)


def test_a_first_model_that_is_not_there_is_refused(data: Path, deep_model: Path) -> None:
    done = score(data, "out.jsonl", model=deep_model, first="nowhere/at/all", **FIRST)
    assert "--first nowhere/at/all: no such directory" in done["error"]


# A rare answer: recall and precision of the first label.

RARE: dict[str, Any] = {"recall": 0.9, "precision": 0.9, "labels": LABELS, "dtype": "float32", "exit_rows": 60}


def test_recall_and_precision_of_the_first_label_hold(
    data: Path,
    deep_model: Path,
    shallow_model: Path,
    in_full: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In workers; then here, in a job that is stopped and goes on with the same decisions, and without them."""
    given = {"model": deep_model, "first": shallow_model, **RARE}
    assert score(data, "whole.jsonl", workers=2, **given)["status"] == "complete"
    rows, exits = read_output("whole.jsonl"), read_report("whole.run.json")["exits"]
    decided = [row for row in rows if row["method"] == "first"]
    assert len(decided) > ROWS / 8
    label = NAMES[0]
    output, full = ([row["prediction"] == label for row in each] for each in (rows, in_full))
    both = sum(own and right for own, right in zip(output, full, strict=True))
    assert min(both / sum(full), both / sum(output)) >= 0.9
    for row, right in zip(rows, in_full, strict=True):
        assert row["score"] == pytest.approx(right["score"], abs=0.3 if row["method"] == "first" else 1e-5)
    rare = exits["rare"]
    assert rare["accepted"] == sum(row["prediction"] == label for row in decided)
    assert rare["refused"] == len(decided) - rare["accepted"]
    assert (rare["label"], rare["recall"], exits["rows_in_full"]) == (label, 0.9, 60 + rare["sampled"])
    assert not Path("whole.exit.json").exists()

    for lost in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(Sink, "finish", interrupted)
            assert score(data, "out.jsonl", overwrite=True, **given)["status"] != "complete"
        if lost:
            Path("out.jsonl.prefill/first.f32").write_bytes(b"")
            for part in Path("out.jsonl.prefill").glob("part-*"):
                part.unlink()
        assert score(data, "out.jsonl", resume=True, **given)["status"] == "complete"
        assert_same(read_output("out.jsonl"), rows)
        assert not Path("out.jsonl.prefill/first.f32").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"labels": "n,t,o"}, "--recall: a row that does not have the first label must have the other one"),
    ],
)
def test_what_cannot_go_with_recall_is_refused(data: Path, deep_model: Path, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        score(data, "out.jsonl", **{"model": deep_model, "first": "words", **RARE, **flags})


# --max-flips alone: the job finds the cheapest reading that it can prove.

needs_kernel = pytest.mark.skipif(
    int8_kernel() is None, reason="no kernel here: torch's products in int8 take minutes"
)
ALONE: dict[str, Any] = {"max_flips": FLIPS, "exit_rows": 180, "labels": LABELS, "dtype": "float32", "threads": 1}
SPEED = "prefillcli.models.dtype.times_as_long"


@pytest.fixture
def fast_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is made for int8."""
    monkeypatch.setattr(SPEED, lambda *_: 0.4)


@pytest.fixture(scope="module")
def alone(data: Path, deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job on a processor that is made for int8."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "granularity", Granularity(batch_rows=64, window_rows=64))
        patch.setattr(SPEED, lambda *_: 0.4)
        assert score(data, folder / "out.jsonl", model=deep_model, audit=60, **ALONE)["status"] == "complete"
    return folder


def by_int8(row: dict[str, Any]) -> bool:
    """Whether the model in int8 decided a row, at its end or inside it."""
    return row["method"] == "first" and -LAYERS < row["exit_layer"] <= 0


@needs_kernel
def test_rows_leave_where_it_is_cheapest_and_keep_their_answers(alone: Path, in_full: list[Any]) -> None:
    rows, exits = read_output(alone / "out.jsonl"), read_report(alone / "out.run.json")["exits"]
    assert (exits["status"], exits["tried"], exits["left_out"]) == ("learnt", ["words", "int8", "exits"], {})
    for label in NAMES:
        own = [row for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert sum(row["prediction"] != label for row in own) <= FLIPS * len(own)
    decided = [row for row in rows if by_int8(row)]
    assert len(decided) > ROWS / 4
    assert any(row["exit_layer"] < 0 for row in decided)  # inside
    for row, full in zip(rows, in_full, strict=True):
        if row["method"] == "full":
            assert (row["exit_layer"], row["score"]) == (None, pytest.approx(full["score"], abs=1e-5))
        if row["audit_score"] is not None:
            assert row["audit_score"] == pytest.approx(full["score"], abs=1e-5)
    words, narrow = exits["first"]
    assert (words["model"], words["layer"], narrow["model"], narrow["layer"]) == ("words", -LAYERS, "int8", 0)
    assert words["rows"] == sum(row["exit_layer"] == -LAYERS for row in rows)
    assert narrow["rows"] == len(decided)
    assert (narrow["cost"], narrow["read_rows"] >= narrow["rows"]) == (0.4, True)
    for each in exits["questions"]["answer"]["layers"]:
        assert each["rows"] == sum(row["exit_layer"] == each["layer"] for row in rows)
        assert each["saves"] > 0


@needs_kernel
def test_inside_int8_rows_leave_with_what_that_layer_predicts(alone: Path, data: Path, deep_model: Path) -> None:
    """Against transformers' forward in float32, which int8 is near."""
    found = json.loads((alone / "out.exit.json").read_text())["questions"][0]["exits"]
    probes = {each["layer"] + 1: each["probe"] for each in found if each["probe"]["kind"] == "ridge"}
    rows = [row for row in read_output(alone / "out.jsonl") if -LAYERS < (row["exit_layer"] or 1) < 0]
    rows = [row for row in rows if row["exit_layer"] in probes][::7]
    assert len(rows) > 5
    model = AutoModelForCausalLM.from_pretrained(deep_model, attn_implementation="eager").eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(deep_model), prompts()
    for row in rows:
        with torch.inference_mode():
            shown = model(**tokenizer(texts[row["row"]], return_tensors="pt"), output_hidden_states=True)
        weights, bias = (
            np.frombuffer(base64.b64decode(each["float32"]), "<f4").reshape(each["shape"]).astype(np.float64)
            for each in (probes[row["exit_layer"]]["weights"], probes[row["exit_layer"]]["bias"])
        )
        inner = shown.hidden_states[LAYERS + row["exit_layer"]][0, -1].double().numpy()
        logits = inner / np.linalg.norm(inner) @ weights + bias
        assert row["score"] == pytest.approx(1 / (1 + np.exp(logits[1] - logits[0])), abs=0.03)


@needs_kernel
@pytest.mark.nightly
def test_workers_decide_the_same_rows(alone: Path, data: Path, deep_model: Path, fast_int8: None) -> None:
    assert score(data, "out.jsonl", model=deep_model, audit=60, workers=2, **ALONE)["status"] == "complete"
    assert_same(read_output("out.jsonl"), read_output(alone / "out.jsonl"))


@needs_kernel
def test_another_machine_without_fast_int8_goes_on_with_what_was_learnt(
    alone: Path, data: Path, deep_model: Path, monkeypatch: pytest.MonkeyPatch, fast_int8: None
) -> None:
    given = {"exit": False, "audit": 60, "exit_rows": ALONE["exit_rows"]}
    stop_in_the_third_window(data, deep_model, monkeypatch, **given)
    monkeypatch.setattr(SPEED, lambda *_: 1.3)
    monkeypatch.setattr(exit_learning.ExitLearning, "learn", lambda _: pytest.fail("it is learnt once"))
    assert score(data, "out.jsonl", model=deep_model, resume=True, audit=60, **ALONE)["status"] == "complete"
    rows, before = read_output("out.jsonl"), read_output(alone / "out.jsonl")
    assert_same(rows[:64], before[:64])
    assert any(by_int8(row) for row in rows[:128])
    assert not any(by_int8(row) for row in rows[128:])
    assert any(row["exit_layer"] is not None for row in rows[128:])
    report = read_report("out.run.json")
    assert "1.3 times as long in int8" in report["exits"]["left_out"]["int8"]
    assert report["fingerprint"] == read_report(alone / "out.run.json")["fingerprint"]


@needs_kernel
def test_a_profile_serves_the_next_night_even_without_int8(
    alone: Path, deep_model: Path, fast_int8: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tonight = write_jsonl("tonight.jsonl", [{"prompt": text.replace("fox", "dog")} for text in prompts(100)])
    given = ALONE | {"exit_rows": 40, "exit_profile": alone / "out.exit.json"}
    assert score(tonight, "out.jsonl", model=deep_model, **given)["status"] == "complete"
    exits = read_report("out.run.json")["exits"]
    assert (exits["status"], exits["rows_in_full"]) == ("reused", 40)
    assert any(by_int8(row) for row in read_output("out.jsonl"))
    monkeypatch.setattr(SPEED, lambda *_: 1.3)
    assert score(tonight, "slow.jsonl", model=deep_model, **given)["status"] == "complete"
    assert read_report("slow.run.json")["exits"]["status"] == "reused"
    assert not any(by_int8(row) for row in read_output("slow.jsonl"))
    other = score(tonight, "other.jsonl", model=deep_model, exit=True, **given)
    assert (other["exit_code"], "different prompt settings" in other["error"]) == (2, True)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            {"limit": 100, "audit": 5},
            "50 rows read in full, 12 to judge of each of 2 answers, would prove at most 22.09% flips",
        ),
        ({"engine": "hf", "limit": 20}, "the hf engine has no early exits"),
    ],
)
def test_a_job_that_could_prove_nothing_reads_nothing_first(
    data: Path, deep_model: Path, in_full: list[Any], flags: dict[str, Any], reason: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(FullRows, "read", lambda *_: pytest.fail("rows are read to learn"))
    monkeypatch.setattr("prefillcli.core.models.Models.small_walk", lambda *_: pytest.fail("int8 is loaded"))
    assert score(data, "out.jsonl", model=deep_model, **ALONE | flags)["status"] == "complete"
    exits = read_report("out.run.json")["exits"]
    assert exits["status"] == "none"
    assert reason in exits["reason"]
    assert f"--max-flips: {exits['reason']}; all rows are read in full" in capsys.readouterr().err
    for row, full in zip(read_output("out.jsonl"), in_full, strict=False):
        assert (row["method"], row["score"]) == ("full", pytest.approx(full["score"], abs=1e-5))
    again = score(data, "out.jsonl", model=deep_model, resume=True, **ALONE | flags)
    assert (again["status"], read_report("out.run.json")["exits"]["reason"]) == ("complete", exits["reason"])


@needs_kernel
def test_each_question_finds_its_own_ways_and_one_of_several_prompts_none(
    data: Path, deep_model: Path, fast_int8: None
) -> None:
    given = {name: value for name, value in write_questions(("fox", "dog")).items() if name != "exit"}
    assert score(data, "out.jsonl", model=deep_model, **given)["exit_code"] == 0
    rows, exits = read_output("out.jsonl"), read_report("out.run.json")["exits"]
    for name, own in exits["questions"].items():
        inner = {each["layer"] for each in own["layers"] if -LAYERS < each["layer"] <= 0}
        assert sum(row[f"{name}.exit_layer"] in inner for row in rows) > ROWS / 8
    Path("q.yaml").write_text("questions: [{name: mood, type: choice, instructions: Which one, choices: [n, t, o]}]")
    given |= {"questions": "q.yaml", "orders": 2, "limit": 20}
    assert score(data, "two.jsonl", model=deep_model, **given)["exit_code"] == 0
    assert read_report("two.run.json")["exits"]["reason"].startswith("a question has several prompts")


@pytest.mark.parametrize(
    ("flags", "patched", "why"),
    [
        ({}, (SPEED, 1.3), "products take 1.3 times as long in int8 as in float32"),
        ({}, ("prefillcli.runtime.memory.loadable_memory", 1 << 20), "its copy would take 0.0 GiB, and 0.0 GiB are"),
        ({}, ("prefillcli.models.dtype.is_packed", True), "the model's weights are packed"),
        ({}, ("prefillcli.walk.narrow.narrowed_layers", {}), "no weights of this model can be multiplied so"),
        ({"weights": "stream"}, (SPEED, 0.4), "with --weights stream no second copy is held"),
        ({}, (SPEED, 0.6), "to learn from rows that are read twice would take longer than it may save"),
    ],
)
def test_a_dry_run_says_what_is_left_out_and_why(
    data: Path, deep_model: Path, flags: dict[str, Any], patched: tuple[str, Any], why: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(patched[0], lambda *_: patched[1])
    assert score(data, "o.jsonl", model=deep_model, dry_run=True, **ALONE | flags | {"quiet": False})["exit_code"] == 0
    found = read_report("o.dry-run.json")["outlooks"]["exits"]
    assert (found["tries"], why in found["left_out"]["int8"]) == (["words", "exits"], True), found
    assert "int8 is left out: " in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_says_what_it_may_gain(
    data: Path, deep_model: Path, capsys: pytest.CaptureFixture[str], fast_int8: None
) -> None:
    given = ALONE | {"model": deep_model, "dry_run": True, "exit_rows": 120, "quiet": False}
    assert score(data, "o.jsonl", **given)["exit_code"] == 0
    found = read_report("o.dry-run.json")["outlooks"]["exits"]
    assert found["most_gain"] == pytest.approx(ROWS / (120 * 1.4))
    assert found["int8_gain"] == pytest.approx(ROWS / (120 * 1.4 + 240 * 0.4))
    said = " ".join(capsys.readouterr().err.split())
    assert "words, int8 (40% of the time of float32 here) and exits" in said
    assert f"at most {found['most_gain']:.2f}x" in said
    assert score(data, "o.jsonl", **given | {"limit": 100})["exit_code"] == 0
    found = read_report("o.dry-run.json")["outlooks"]["exits"]
    assert (found["rows_in_full"], found["tries"]) == (0, [])
    assert "would prove at most" in found["reason"]


def test_weights_of_unusual_shapes_leave_int8_out(data: Path, tmp_path: Path) -> None:
    narrow = save_model(tmp_path / "narrow", layers=2, hidden=32)
    assert score(data, "o.jsonl", model=narrow, dry_run=True, **ALONE)["exit_code"] == 0
    found = read_report("o.dry-run.json")["outlooks"]["exits"]
    assert found["left_out"] == {"int8": "no weights of this model can be multiplied so"}
