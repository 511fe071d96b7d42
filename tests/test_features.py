"""Each feature is a room that can be deleted: everything else works, and keeps its bits."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from prefillcli.command_line import is_long
from prefillcli.core.feature import features
from prefillcli.models.files import sample_draft, sample_model
from prefillcli.options.commands import COMMANDS
from tests.adapters import save_adapter
from tests.engines.encoder_models import save_encoder
from tests.score.jobs import write_jsonl, write_parquet
from tests.test_architecture import MODULES, PACKAGE, imported
from tests.warm import Warm

ROWS = 24
ENCODER = Path(mkdtemp())
atexit.register(shutil.rmtree, ENCODER)
#: By feature, options that ask for it.
ASKED = {
    "adapters": ["--adapter", "lora"],
    "batchfiles": ["--served-model-name", "m"],
    "determinism": ["--deterministic"],
    "choices": ["--choices-column", "choices"],
    "compress": ["--keep", "0.3", "--draft", str(sample_draft()), "--compress-above", "0"],
    "calibration": ["--template", "{{ prompt }}", "--calibrate-with", "N/A"],
    "estimate": ["--estimate", "20"],
    "exits": ["--exit", "--max-flips", "0.9"],
    "evaluation": ["--truth", "answer"],
    "gates": ["--expect-rows", "24"],
    "likelihood": ["--target-column", "answer"],
    "ordered": ["--label-values", "1,0"],
    "incremental": ["--since", "none.jsonl"],
    "rationale": ["--rationale", "4", "--rationale-when", "score > 0.4"],
    "evidence": ["--evidence"],
    "pairs": ["--pair-column", "answer", "-m", str(save_encoder(ENCODER))],
    "questions": ["--questions", "questions.yaml"],
    "rejects": ["--rejects", "rejects.jsonl"],
    "streaming": ["--weights", "stream"],
}
#: A room is a folder or a module.
ROOMS = {
    path.stem: path
    for path in (PACKAGE / "features").iterdir()
    if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
}
NAMES = sorted(ROOMS)


@cache
def adapter() -> Path:
    """The folder of an adapter of the sample model."""
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return save_adapter(sample_model(), folder / "lora")


@cache
def warm() -> Warm:
    started = Warm()
    atexit.register(started.close)
    return started


def run(package: Path, folder: Path, *words: str) -> tuple[int | None, str]:
    """Exit code of the command of this package in a folder, and what it says."""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    code, out, error = warm().run(package.parent, ["prefillcli", *words], folder=folder, environment=environment)
    return code, error if code else out


def scores(package: Path, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of a job in this folder, without the time that they took."""
    rows = "batch.jsonl" if "--served-model-name" in options else "in.parquet"
    words = ["score", rows, "-o", "out.jsonl", "-m", str(sample_model()), "--quiet", *options]
    code, said = run(package, folder, *words)
    assert code == 0, said
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def make_folder(folder: Path) -> Path:
    """A folder with an input, and an adapter."""
    folder.mkdir()
    shutil.copytree(adapter(), folder / "lora")
    answers = ["Yes" if at % 2 else "No" for at in range(ROWS)]
    prompts = [f"Is {at} an odd number?" for at in range(ROWS)]
    choices = [["Yes it is", "No"]] * ROWS
    write_parquet(str(folder / "in.parquet"), prompt=prompts, answer=answers, choices=choices)
    bodies = [{"model": "m", "prompt": prompt} for prompt in prompts]
    lines = [
        {"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    write_jsonl(folder / "batch.jsonl", lines)
    question = "{name: odd, text: '? Answer:', labels: [Yes, No]}"
    (folder / "questions.yaml").write_text(f"document: '{{{{ prompt }}}}'\nquestions: [{question}]\n")
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What the whole package gives, by the feature that is asked for; nothing for a plain job."""

    @cache
    def scored(name: str) -> list[dict[str, Any]]:
        folder = make_folder(tmp_path_factory.mktemp("whole") / "job")
        return scores(PACKAGE, folder, *ASKED.get(name, ()))

    return scored


def test_every_feature_is_asked_for_here() -> None:
    assert NAMES == sorted(ASKED) == sorted(each.__module__.split(".")[2] for each in features())


def test_nothing_outside_a_feature_imports_it() -> None:
    for module, path in MODULES.items():
        for name in imported(path):
            room = name.split(".")[2] if name.startswith("prefillcli.features.") else None
            assert room is None or module.split(".")[1:3] == ["features", room], (module, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_feature_can_be_deleted(name: str, tmp_path: Path, whole: Callable[[str], list[dict[str, Any]]]) -> None:
    rest = tmp_path / "copy" / "prefillcli"
    shutil.copytree(PACKAGE, rest)  # with the bytecode: compiling takes longer than a job
    room = rest / "features" / ROOMS[name].name
    shutil.rmtree(room) if room.is_dir() else room.unlink()
    own = next(each for each in features() if each.__module__.split(".")[2] == name)
    for command, group in own.options.items():
        flag = "--help-all" if is_long(COMMANDS[command]) else "--help"
        code, shown = run(rest, tmp_path, command, flag)
        assert code == 0
        left = {name.replace("-", "_") for name in re.findall(r"^  (?:-\w, )?(?:--)?([\w-]+)", shown, re.MULTILINE)}
        assert "quiet" in left
        core = [base for base in group.__mro__ if base.__module__.startswith("prefillcli.options.")]
        assert not left & (group.model_fields.keys() - {name for base in core for name in base.model_fields})
    assert scores(rest, make_folder(tmp_path / "plain")) == whole("")
    other = NAMES[(NAMES.index(name) + 1) % len(NAMES)]
    assert scores(rest, make_folder(tmp_path / "beside"), *ASKED[other]) == whole(other)
    asking = make_folder(tmp_path / "asking")
    code, said = run(rest, asking, "score", "in.parquet", *ASKED[name])
    assert code == 2
    assert "No such option" in said
    assert sorted(path.name for path in asking.iterdir()) == ["batch.jsonl", "in.parquet", "lora", "questions.yaml"]
