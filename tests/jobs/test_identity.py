"""What makes two runs the same job: derived from what each option says it changes, and the same as it always was."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.csv
import pytest
from pydantic import ValidationError

from prefillcli.models.files import sample_draft, sample_model
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.option import details_of
from prefillcli.scoring.identity import LocalModels, fingerprint, hash_engine, output_job
from prefillcli.scoring.opening import open_inputs, open_rows
from tests.jobs.jobs import read_output, read_report, score, write_jsonl
from tests.unit.engines.encoder_models import save_encoder
from tests.unit.models.image_families import make_family

TEXTS = [f"A note on the harbour. {'The tide was low. ' * (20 + number)}Is it {number}?" for number in range(4)]
ROWS = [
    {"id": f"r{number}", "text": text, "prompt": text, "answer": "Yes" if number % 2 else "No"}
    for number, text in enumerate(TEXTS)
]

#: Jobs, and their fingerprints as recorded: if one changes, outputs that people began belong to another job.
PLAIN = {
    "input": "be57e83f612b83beb0eb880eee6f3bd610635282c85b2575ca5e04267e4689db",
    "model": "4f2ef9e41bdda69efccc1a03828c32320155e277278fa132774f4400b2ab17d7",
    "tokenizer": "626d58dbe819262c9bb3937fd9d7284c17b2f97c0cd69d4b71718e8dece8e402",
    "prompt": "d2ccf209a821abb862f596378e66a1e4c7ddbf7d71cfd01ef879acfea841970a",
    "labels": "24e638c90c672b9db9df9f7d3312a6502d8b1154197c16f0a7fa765c950b3c7a",
    "settings": "13db1a90517d653341a24c8459a5bcdc6ba8eaa8307ab9728feb537cb6d18f53",
}
DRAFT = {"draft": "3f581349c4da165981df076bd53dd2d2417719c14909b8f4afb06ab3885f200e"}
RECORDED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({}, {}),
    "columns": (
        {
            "temperature": 2.0,
            "dtype": "float32",
            "id_column": "id",
            "keep_columns": ("answer",),
            "template": "{{ text }}",
            "labels": "No,Yes= Yes",
        },
        {
            "prompt": "4ea770be3b8b76a78b7628574f6460dbebb5b4b86c6b1736b405de6dbd2fa6de",
            "labels": "92a3cbeef620d867c3d59b157c1b91971701262cbd92c15210cbe0a07f17cfb3",
            "settings": "de32aa43938deaf047deaceb3cf2c59d049e3e8b2dba7e7a8499f6d14dd29317",
        },
    ),
    "compressed": (
        {
            "draft": sample_draft(),
            "keep": "auto",
            "max_flips": 0.2,
            "audit": 3,
            "truth": "answer",
            "compress_above": 0,
            "keep_last": 16,
        },
        DRAFT | {"compression": "cd0fd4439ce848b71f22949ff7040eaef6503606a8a2df6c9d8775249f2e7e33"},
    ),
    "as in the paper": (
        {"draft": sample_draft(), "keep": 0.5, "paper": True, "compress_above": 16},
        DRAFT | {"compression": "4876e7db22035428ed0d9b8ecfe5229c1ad47ebdfa6937d22a8f9fef9c137a9d"},
    ),
    "hf": (
        {"engine": "hf", "engine_options": {"attn_implementation": "eager"}},
        {"engine": "536940e338b040983725cb4b86ec876162b05ba3d8192226883c568ef5e5f0a0"},
    ),
}
#: The vllm engine's part by its options; sizes do not count.
VLLM = {
    "{}": "90959fcbf0a4a50f6c8ae78f8850e7ee9e9ea0433e34dea524a8a882210e7a61",
    '{"block_size": 32, "seed": 1}': "ba40bfea16709d0800f3c65073663df92d11f2a56cafe7849f2554a5c4880f5b",
}

#: Values that are not the default; other options take the first of VALUES that they can.
OTHER: dict[str, Any] = {
    "estimate": 20,
    "head": "vocabulary",
    "rejects": "rejects.jsonl",
    "review": "look.jsonl",
    "review_below": "0.9",
    "rationale_when": "score > 0.5",
    "keep": 0.25,
    "prompt_column": "text",
    "image_column": ["text"],
    "image_root": ".",
    "pair_column": "text",
    "choices_column": "text",
    "target_column": "text",
    "template": "{{ text }}",
    "labels": "No,Yes",
    "label_values": (1.0, 0.0),
    "csv_separator": ",",
    "dtype": "bfloat16",
    "chat": False,
    "id_column": "id",
    "keep_columns": ("answer",),
    "truth": "answer",
    "engine": "hf",
    "engine_options": {"attn_implementation": "eager"},
    "device": "cpu",
    "shard": "2/4",
    "worker_resources": {"num_cpus": 2},
    "exit_rows": 500,
    "format": "openai",
    "compute": "int8",
    "chat_option": {"reasoning_effort": "low"},
    "thinking": "on",  # auto is off where the template has a switch
}
VALUES = (0.5, 5, "5MiB", "text", True, False)
#: What else there must be to see a change.
BESIDE: dict[str, dict[str, Any]] = {
    "chat": {"model": "chat"},
    "system": {"model": "chat"},
    "answer_prefix": {"model": "chat"},
    "chat_option": {"model": "chat"},
    "thinking": {"model": "chat"},
    "pair_column": {"model": "encoder", "draft": None},
    "image_column": {"model": "sees", "draft": None},
    "seed": {"sample": 2},
    "exit_rows": {"exit": True},
    "flips_of": {"exit": True},
    "engine_options": {"engine": "hf"},
    "partition": {"inputs": ("day=1", "day=2")},
    "csv_separator": {"inputs": ("csv",)},
    "csv_quoting": {"inputs": ("csv",)},
    "format": {"inputs": ("batch",), "draft": None, "keep": 1.0},
    "served_model_name": {"inputs": ("batch",)},
}
BATCH = [{"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Yes?"}}]
#: Other contents are another job: tests/unit/rows/test_fingerprints.py, tests/jobs/test_calibrated.py. Code of the
#: model: below. Adapters: tests/jobs/test_adapters.py. Questions: tests/jobs/test_questions.py.
FILES = {"inputs", "model", "revision", "draft", "trust_remote_code", "calibration", "exit_profile"}
FILES |= {"adapter", "adapter_column", "questions"}


@pytest.fixture(autouse=True)
def _rows() -> None:
    write_jsonl("rows.jsonl", ROWS)


def identity(settings: ScoreSettings) -> tuple[dict[str, str], dict[str, Any]]:
    """The job's fingerprint and which rows it has, without running it. Options are also given that go with others
    alone, and are then without effect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefillcli.scoring.opening.checks_outputs", lambda settings: False)
        rows, parts = open_rows(settings, (settings.ids.id_column, *settings.files.keep_columns))
        inputs = open_inputs(rows, parts)
    inputs.builder.close()
    return fingerprint(inputs, parts, LocalModels(settings)), output_job({}, settings).selection


BASE: dict[str, Any] = {"inputs": ("rows.jsonl",), "model": str(sample_model()), "draft": str(sample_draft())}


@cache
def plain_identity() -> tuple[dict[str, str], dict[str, Any]]:
    return identity(ScoreSettings(**BASE))


def other_value(name: str) -> Any:
    field = ScoreSettings.options()[name]
    for value in (OTHER[name],) if name in OTHER else (*get_args(field.annotation), *VALUES):
        try:
            found = ScoreSettings.of({"inputs": ["rows.jsonl"], name: value}).value(name)
        except ValidationError:
            continue
        if found not in (field.default, None):
            return found
    raise AssertionError(f"--{name}: no value of {VALUES} will do")


@pytest.mark.parametrize("job", RECORDED)
def test_a_job_is_still_the_one_that_was_recorded(job: str) -> None:
    flags, own = RECORDED[job]
    assert score("rows.jsonl", model=sample_model(), **flags)["exit_code"] == 0
    assert read_report()["fingerprint"] == PLAIN | own


@pytest.mark.parametrize("options", VLLM)
def test_the_options_of_an_engine_are_still_known(options: str) -> None:
    settings = ScoreSettings(inputs=("rows.jsonl",), engine="vllm", engine_options=json.loads(options))
    assert hash_engine(settings) == VLLM[options]


@pytest.mark.parametrize("name", sorted(ScoreSettings.options().keys() - FILES))
def test_the_fingerprint_has_what_changes_scores_columns_or_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda *_: 0.4)  # a processor that is made for int8
    beside = BESIDE.get(name, {})
    for folder in beside.get("inputs", ()):
        Path(folder).mkdir()
        if folder == "csv":
            pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), Path(folder) / "rows.csv")
        else:
            write_jsonl(Path(folder) / "rows.jsonl", BATCH if folder == "batch" else ROWS)
    if beside.get("model") == "chat":
        shutil.copytree(sample_model(), "chat")
        Path("chat/chat_template.jinja").write_text(
            "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}"
        )
    if beside.get("model") == "encoder":
        save_encoder(Path("encoder"))
    if beside.get("model") == "sees":
        make_family("smolvlm", Path("sees"))
    plain = ScoreSettings(**(BASE | beside))
    before = identity(plain) if beside else plain_identity()
    after = identity(plain.with_options({name: other_value(name)}))
    changes = details_of(ScoreSettings, name).changes
    assert (before[0] != after[0]) == (changes in ("scores", "columns", "rows"))
    assert (before[1] != after[1]) == (changes == "rows")


def test_a_job_with_code_of_the_model_is_not_one_without() -> None:
    """The model is of a family that transformers knows, and brings code that computes something else."""
    shutil.copytree(sample_model(), "model")
    config = json.loads(Path("model/config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Doubled"}
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/modeling.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\n"
        "class Doubled(LlamaForCausalLM):\n"
        "    def _init_weights(self, module):\n"
        "        pass\n\n"
        "    def forward(self, *args, **kwargs):\n"
        "        found = super().forward(*args, **kwargs)\n"
        "        found.logits = 2 * found.logits\n"
        "        return found\n"
    )
    flags = {"model": "model", "engine": "hf"}
    assert score("rows.jsonl", **flags)["exit_code"] == 0
    plain = read_output("out.parquet")
    again = score("rows.jsonl", **flags, trust_remote_code=True, resume=True)
    assert again["exit_code"] == 4
    assert "different settings" in again["error"]
    assert score("rows.jsonl", "own.parquet", **flags, trust_remote_code=True)["exit_code"] == 0
    assert [row["score"] for row in read_output("own.parquet")] != [row["score"] for row in plain]


def test_trust_in_a_model_without_code_changes_nothing() -> None:
    assert score("rows.jsonl", model=sample_model())["exit_code"] == 0
    again = score("rows.jsonl", model=sample_model(), trust_remote_code=True, resume=True)
    assert again["exit_code"] == 0
