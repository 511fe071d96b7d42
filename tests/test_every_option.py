"""Every option of every command is given once, on the command line, with what it needs beside it.

The options are drawn from the commands themselves, as docs/options.md is, so a new one has to be added here. A job
runs as far as it opens its rows and finds its models' folders: no weights are loaded, and torch is not needed. What an
option does then is tested where it belongs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.score_runs import SAMPLES
from prefillcli import command_line
from prefillcli.cli import app
from prefillcli.errors import PrefillError
from prefillcli.options.commands import COMMANDS
from prefillcli.options.option import Settings, as_typed, details_of
from prefillcli.scoring.opening import open_rows
from prefillcli.tools.bench.bench_job import _check as check_bench

Values = dict[str, Any]
MODEL, DRAFT = str(SAMPLES / "models" / "target"), str(SAMPLES / "models" / "draft")

KEPT: Values = {"draft": DRAFT, "keep": 0.5}
SELF: Values = {"draft": "self", "keep": 0.5}
WRITES: Values = {"rationale": 5}
RETRIEVES = WRITES | {"speculation": "retrieval"}
RAY: Values = {"runner": "ray"}
EXITS: Values = {"exit": True}
ONE: Values = {"ask": "Is it late?"}
#: A value of each option, and what it needs beside it.
OPTIONS: dict[str, tuple[Any, Values]] = {
    **{name: (value, {}) for name, value in {
        "limit": 3, "sample": 2, "csv_separator": ",", "prompt_column": "text", "template": "{{ text }}!",
        "chat": False,
        "system": "Be brief.", "thinking": "off", "chat_option": "date=2026-01-31", "answer_prefix": "So:",
        "max_length": 100, "on_long": "truncate-left", "literal": False, "max_row_bytes": "1MiB",
        "labels": "late,other",
        "label_norm": "tokens", "label_end": ".", "temperature": 2.0, "model": MODEL, "trust_remote_code": True,
        "device": "cpu", "dtype": "float32", "head": "vocabulary", "layout": "generic", "threads": 1,
        "gguf_cache": "1GiB", "memory": "1GiB",
        "pack_tokens": 512, "chunk_tokens": 64, "prefix_kv": "discard", "draft": DRAFT,
        "hidden": "device", "compile": True, "progress_interval": 5.0, "quiet": True, "debug": True,
        "log_format": "json", "run_id": "night", "workers": 2, "runner": "ray", "overwrite": True,
        "report": "o.json", "metrics_file": "o.prom", "max_error_rate": 0.5, "skip_empty": True,
        "target_column": "right", "ask": "Is {{ id }} late?", "questions": "q.yaml", "choices_column": "own",
        "evidence": True, "label_values": "1,2", "rationale": 5, "deterministic": True, "retry_errors": True,
        "expect_rows": "3", "min_label_mass": 0.1, "max_drift": 0.1, "calibration": "calibration.json",
        "exit": True, "first": "words", "compute": "int8", "estimate": 20, "truth": "right", "pair_column": "own",
        "review_below": "0.9", "rejects": "r.jsonl", "adapter": "adapter", "weights": "stream", "output": "o.parquet",
        "id_column": "id", "keep_columns": 'id,"right"', "shard": "1/2", "resume": True, "engine": "hf",
        "dry_run": True, "row": "1", "html": "o.html", "full": True, "mode": "full", "confirm_seconds": 0.0,
        "fit_seconds": 1.0, "method": "hybrid", "rounds": 1, "truth_from": "in.csv", "accuracy": 0.9, "folds": 2,
        "csv_quoting": "none", "since": "before.parquet", "empty_text": "skip", "image_column": "own",
        "image_root": "parts", "allow_urls": True, "max_image_pixels": 1000, "max_pixels": 9000,
        "min_pixels": 10, "no_thumbnails": True,
    }.items()},
    "seed": (1, {"sample": 2}),
    **{name: (value, {"head": "a.head"}) for name, value in {
        "adapt": True, "any_wording": True, "max_shift": 0.5,
    }.items()},
    "add": ("a.head", {}),
    "most_layers": (3, {}),
    "keep_worse": (True, {}),
    "revision": ("v1", {"model": "someone/some-model"}),
    "keep": (0.5, {"draft": DRAFT}),
    "draft_tokenizer": ("same", KEPT),
    "price_per_hour": (2.5, {"dry_run": True}),
    "ray_address": ("auto", RAY),
    "worker_resources": ("num_cpus=1", RAY),
    "ray_timeout": (9.0, RAY),
    "token_logprobs": (True, {"target_column": "right"}),
    "stride": (8, {"target_column": "right"}),
    "options": ('late,"early, or not"', ONE),
    "levels": ("1,2,3", ONE),
    "orders": (2, ONE | {"options": "a,b"}),
    "rationale_template": ("{{ label }} since", WRITES),
    "rationale_temperature": (0.5, WRITES | {"speculation": "off"}),
    "rationale_seed": (1, WRITES | {"rationale_temperature": 0.5, "speculation": "off"}),
    "speculation": ("lookup", WRITES),
    "speculation_tokens": (2, WRITES | {"speculation": "lookup"}),
    "retrieval_budget": (8, RETRIEVES),
    "retrieval_chunk": (4, RETRIEVES),
    "rationale_when": ("score > 0.5", WRITES),
    "rationale_limit": (1, WRITES | {"rationale_when": "score > 0.5"}),
    "drift_from": ("earlier.json", {"max_drift": 0.1}),
    "calibrate_with": ("N/A", {"template": "{{ text }}!"}),
    "calibrate_columns": ("text", {"template": "{{ text }}!", "calibrate_with": "N/A"}),
    "self_layer": (2, SELF),
    "paper": (True, KEPT),
    **{name: (value, KEPT) for name, value in {
        "lookahead": 2, "query_window": 2, "query_reduce": "max", "pool": 3, "select_chunk": 8, "compress_above": 9,
        "keep_first": 2, "keep_last": 9, "keep_private": False, "compress_per_row": True, "audit": 2,
    }.items()},
    "flips_of": ("all", EXITS),
    "exit_rows": (200, EXITS),
    "exit_profile": ("exits.json", EXITS),
    "recall": (0.9, {"first": "words"}),
    "precision": (0.9, {"first": "words"}),
    "max_flips": (0.1, EXITS),
    "wanted_precision": (0.9, {"truth": "right"}),
    "show_text": (True, {"truth": "right"}),
    "served_model_name": ("judge,other", {"inputs": "requests.jsonl"}),
    "format": ("openai", {"inputs": "requests.jsonl", "output": "o.jsonl"}),
    "review": ("look.jsonl", {"review_below": "0.9"}),
    "adapter_column": ("own", {"adapter": "a=adapter"}),
    "weights_memory": ("1GiB", {"weights": "stream"}),
    "partition": (True, {"inputs": "parts/"}),
    "engine_options": ("a=1", {"engine": "vllm"}),
    "profile": ("profile.json", {"dry_run": True}),
    "per_answer": (True, {"accuracy": 0.9}),
    "review_blank": ("confirmed", {"truth_from": "in.csv"}),
}  # fmt: skip
#: Where an option of this name has another meaning or other needs in a command.
OF_COMMAND: dict[tuple[str, str], tuple[Any, Values]] = {
    ("score", "draft"): (DRAFT, {"keep": 0.5}),
    ("score", "served_model_name"): ("judge,other", {"inputs": "requests.jsonl", "output": "o.jsonl"}),
    ("profile", "output"): ("p.json", {}),
    ("bench", "output"): ("b.json", {}),
    ("calibrate", "output"): ("c.json", {}),
    ("calibrate", "truth"): ("right", {}),
    ("calibrate", "method"): ("platt", {}),
    ("calibrate", "prior"): ("rows", {}),
    ("calibrate", "seed"): (1, {}),
    ("calibrate", "id_column"): ("id", {"truth_from": "in.csv"}),
    ("fit", "compute"): ("int8", {}),
    ("fit", "output"): ("b.head", {}),
    ("inspect", "question"): ("late", {"questions": "q.yaml"}),
    ("inspect", "format"): ("openai", {"inputs": "requests.jsonl"}),
    ("inspect", "exit_profile"): ("exits.json", {}),
    ("bench", "seed"): (1, {"sample": 2}),
    ("bench", "first"): ("words", {"method": "first"}),
    ("bench", "exit_rows"): (50, {"method": "early-exit"}),
    ("bench", "max_flips"): (0.1, {"method": "early-exit"}),
    ("profile", "price_per_hour"): (2.5, {}),
}
#: What an option needs that there may not be here: a package, the hub, or a file that another command writes.
LACKING = {
    "revision": "on the hub",
    "engine_options": "vllm",
    "calibration": "no such file\nmake it with prefill calibrate",
    "exit_profile": "no such file",
    **dict.fromkeys(["adapt", "any_wording", "max_shift"], "no such file\nmake it with prefill fit"),
    **dict.fromkeys(["runner", *(name for name, (_, beside) in OPTIONS.items() if beside == RAY)], "ray"),
}
LEAST: dict[str, Values] = {
    "score": {"inputs": "in.csv", "model": MODEL, "prompt_column": "text"},
    "inspect": {"inputs": "in.csv", "model": MODEL, "prompt_column": "text"},
    "profile": {"inputs": "in.csv", "model": MODEL, "prompt_column": "text"},
    "bench": {"inputs": "in.csv", "model": MODEL, "prompt_column": "text"},
    "merge": {"output": "o.parquet"},
    "doctor": {},
    "calibrate": {"scores": "scores.parquet", "truth": "right"},
    "fit": {"inputs": "in.csv", "model": MODEL, "prompt_column": "text", "truth": "right"},
}
CASES = [(command, name) for command, kind in COMMANDS.items() for name in kind.of_level("first", "more", "rare")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that options name."""
    at = tmp_path_factory.mktemp("options")
    rows = [
        {"id": f"r{number}", "text": "fox " * number + "late", "right": "Yes", "own": "a"} for number in range(1, 4)
    ]
    lines = ["id,text,right,own", *(",".join(row.values()) for row in rows)]
    (at / "in.csv").write_text("\n".join(lines) + "\n")
    pq.write_table(pa.Table.from_pylist(rows), at / "before.parquet")
    (at / "parts" / "day=1").mkdir(parents=True)
    pq.write_table(pa.table({"text": ["fox"]}), at / "parts" / "day=1" / "a.parquet")
    late = {"late": {"type": "predicate", "instructions": "Is it late"}}
    (at / "q.yaml").write_text(json.dumps({"questions": late}))
    asked = [{"type": "predicate", "instructions": "Is it late"}]
    (at / "requests.jsonl").write_text(
        json.dumps({"custom_id": "a", "model": "judge", "input": "x", "questions": asked})
    )
    (at / "adapter").mkdir()
    (at / "adapter" / "adapter_config.json").write_text("{}")
    return at


@pytest.fixture
def given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], Settings]:
    """Runs a command up to its job, and returns the job's settings."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(command_line, "prepare", lambda threads: None)
    monkeypatch.setattr(command_line, "prepare_allocator", lambda: None)
    seen: list[Settings] = []
    load = command_line.load_options

    def loaded(*arguments: Any) -> Any:
        seen.append(load(*arguments))
        raise typer.Exit

    monkeypatch.setattr("prefillcli.cli.load_options", loaded)

    def run(command: str, words: list[str]) -> Settings:
        done = CliRunner().invoke(app, [command, *words], env={"NO_COLOR": "1"})
        assert seen, f"prefill {command} {' '.join(words)}\n{done.output}"
        return seen.pop()

    return run


def words_of(command: str, values: Values) -> list[str]:
    """The command line that gives these values."""
    kind, found = COMMANDS[command], []
    for name, value in values.items():
        if name == kind.given_by_place():
            found[:0] = [] if value is None else [str(value)]
            continue
        flag = as_typed(kind, name, value)
        if details_of(kind, name).level == "rare":
            found += ["--set", f"{name}={value}"]
        else:
            found += [flag] if isinstance(value, bool) else [flag, str(value)]
    return found


def open_job(command: str, settings: Any) -> None:
    """Do what the command does before torch is imported."""
    if command == "bench":
        check_bench(settings.with_defaults())
    elif command == "fit":
        open_rows(settings, tuple(settings.truth.columns.values()))
    elif command in ("score", "inspect") or (command == "profile" and settings.input.inputs):
        open_rows(settings, (settings.ids.id_column, *settings.files.keep_columns))


@pytest.mark.parametrize(("command", "name"), CASES)
def test_an_option_is_taken_and_its_job_begins(
    given: Callable[[str, list[str]], Settings], command: str, name: str
) -> None:
    assert name in OPTIONS or (command, name) in OF_COMMAND, f"prefill {command} --{name} is new: add it above"
    value, beside = OF_COMMAND.get((command, name)) or OPTIONS[name]
    known = COMMANDS[command].options()
    values = LEAST[command] | {key: own for key, own in beside.items() if key in known} | {name: value}
    if "template" in values or values.get("inputs") in ("requests.jsonl", None):  # these say what a prompt is
        values.pop("prompt_column", None)
    settings = given(command, words_of(command, values))
    assert name in settings.given
    try:
        open_job(command, settings)
    except PrefillError as error:
        if name not in LACKING or LACKING[name] not in str(error):
            raise


def test_no_option_is_listed_that_there_is_not() -> None:
    names = {name for _, name in CASES}
    assert set(OPTIONS) <= names
    assert set(OF_COMMAND) <= set(CASES)
