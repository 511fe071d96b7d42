"""What is wrong with the inputs of a job is told before the libraries are imported that take seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefillcli.options.commands import COMMANDS
from tests.jobs.jobs import score

SAMPLES = Path(__file__).parent.parent / "samples"
HEAVY = ("torch", "transformers", "tokenizers", "scipy", "sklearn", "huggingface_hub")
RUN = f"""
import json, sys
from prefillcli.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as end:
        print(end.code)
heavy = [name for name in {HEAVY!r} if sys.modules.get(name)]
print(json.dumps(heavy))
"""

#: What comes behind the name of a command that reads rows, and what is told.
WRONG = {
    ("no.jsonl",): "input not found: no.jsonl",
    ("no/",): "input not found: no/",
    ("cut.parquet",): "cut.parquet",
    ("in.jsonl", "--prompt-column", "promt"): "no column 'promt'",
    ("other.jsonl",): "no column 'prompt'",
    ("in.jsonl", "--template", "{{ promt }}"): "no column 'promt'",
    ("in.jsonl", "--template", "no.j2"): "--template no.j2: neither Jinja text",
    ("in.jsonl", "--template", "syntax.j2"): "syntax.j2",
    ("in.jsonl", "-m", "./no"): "--model ./no: no such directory",
    ("in.jsonl", "-m", "./empty"): "empty: no config.json",
    ("in.jsonl", "-m", "./bare"): "bare: no .safetensors file",
    ("in.jsonl", "-m", "./damaged"): "config.json: not JSON",
    ("in.jsonl", "-m", "pointer.gguf"): "pointer.gguf: a Git LFS pointer",
    ("in.jsonl", "-m", "page.gguf"): "page.gguf: not a GGUF file",
    ("in.jsonl", "--labels", "Yes"): "at least two labels are needed",
    ("in.jsonl", "--labels", "Yes,,No"): "--labels 'Yes,,No': item 2 is empty",
    ("in.jsonl", "--device", "abacus"): "no such device",
    ("in.jsonl", "--draft", "./no", "--keep", "0.5"): "--draft ./no: no such directory",
    ("in.jsonl", "--recipe", "no.yaml"): "no.yaml",
    ("in.jsonl", "--recipe", "job.yaml"): "unknown key 'inputt'",
}
READING = {
    "score": ("score",),
    "dry run": ("score", "--dry-run"),
    "inspect": ("inspect", "--row", "0"),
    "bench": ("bench",),
    "profile": ("profile", "-o", "p.json"),
}
CASES = {name: {(*begin, *given): said for given, said in WRONG.items()} for name, begin in READING.items()}
CASES["score"] |= {
    ("score", "in.jsonl", "--id-column", "idd"): "no column 'idd'",
    ("score", "in.jsonl", "--keep-columns", "idd"): "no column 'idd'",
    ("score", "in.jsonl", "--truth", "idd"): "no column 'idd'",
    ("score", "in.jsonl", "--adapter", "a=./no", "--adapter-column", "b"): "--adapter-column b: the input has no such",
    ("score", "in.jsonl", "--adapter", "./no"): "--adapter ./no: no such folder",
    ("score", "in.jsonl", "--calibration", "no.json"): "--calibration no.json: no such file",
    ("score", "in.jsonl", "--profile", "no.json"): "--profile no.json: no such file",
    ("score", "in.jsonl", "--keep-columns", "score"): "the output has a column score already",
    ("score", "in.jsonl", "--keep-columns", "logprob_Yes"): "the output has a column logprob_Yes already",
    ("score", "in.jsonl", "--keep-columns", "row"): "the output has a column row already",
    ("score", "in.jsonl", "--truth", "id"): "--truth id",
    ("score", "in.jsonl", "--label-values", "1,2,3"): "3 numbers for 2 labels",
    (
        *("score", "in.jsonl", "--labels", "A,B,C", "--truth", "score", "--wanted-precision", "0.9"),
    ): "--wanted-precision is for two labels",
    ("score", "in.jsonl", "-o", "/proc/out.parquet"): "cannot use /proc/out",
    ("score", "in.jsonl", "--rejects", "/proc/rejects.jsonl"): "cannot use /proc/rejects.jsonl",
    ("score", "in.jsonl", "-o", "strange.parquet"): "strange.parquet exists and was not written by this job",
}
CASES["others"] = {
    ("inspect", "in.jsonl", "--row", "a", "--id-column", "idd"): "no column 'idd'",
    ("bench", "in.jsonl", "--truth", "idd"): "no column 'idd'",
    ("bench", "-m", "./no"): "--model ./no: no such directory",
    ("profile", "-m", "./no"): "--model ./no: no such directory",
    ("profile", "--mode", "hybird"): "--mode 'hybird' does not exist",
    ("merge", "no.parquet"): "no.parquet",
    ("calibrate", "no.parquet", "--truth", "right"): "no.parquet",
    ("verify", "no.parquet"): "no.parquet",
    ("status", "no.parquet"): "no.parquet",
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    row = json.dumps({"prompt": "Is it? Answer:", "id": "a", "score": 1, "logprob_Yes": 0, "row": 7})
    (tmp_path / "in.jsonl").write_text(f"{row}\n")
    (tmp_path / "other.jsonl").write_text('{"text": "Is it?"}\n')
    (tmp_path / "cut.parquet").write_bytes((SAMPLES / "labeling.parquet").read_bytes()[:-100])
    (tmp_path / "syntax.j2").write_text("{{ prompt")
    (tmp_path / "job.yaml").write_text("labels: Yes,No\ninputt: in.jsonl\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"")
    (tmp_path / "pointer.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\n")
    (tmp_path / "page.gguf").write_text("<!doctype html><title>Not found</title>")
    (tmp_path / "strange.parquet").write_bytes(b"whose is it?")
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(list(CASES[name]))],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    *lines, heavy = done.stdout.splitlines()
    assert len(lines) == 2 * len(CASES[name]), done.stderr
    for (given, said), summary, code in zip(CASES[name].items(), lines[::2], lines[1::2], strict=True):
        assert said in json.loads(summary)["error"], given
        assert code in ("1", "2", "4"), given
    assert json.loads(heavy) == []


# What a command has not imported where it ends: with a model's files, a recipe, or an option that is wrong.
DATA = ("numpy", "pyarrow", "pandas", "scipy", "sklearn", "torch", "transformers", "huggingface_hub", "requests")
FILES = (*DATA, "rich", "jinja2")
OPTIONS = (*FILES, "yaml", "fsspec", "asyncio", "http")
ENDS = """
import json, sys
from prefillcli.cli import app
def end(*line):
    try:
        app(line)
    except SystemExit:
        pass
    print("imported:", *sorted({name.partition(".")[0] for name in sys.modules}))
for line in json.loads(sys.argv[1]):
    end(*line)
"""


def test_what_ends_early_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("labels: [")
    helped = [["--help"], *([command, *words] for command in COMMANDS for words in (["--help"], ["--rwo", "x"]))]
    helped += [[command] for command in ("score", "inspect", "merge", "calibrate")]
    wrong = [["score", "in.csv", "--ask", "a", "--labels", "b"], ["score", "in.csv", "--recipe", "job.yaml"]]
    command = [sys.executable, "-c", ENDS, json.dumps(helped + wrong)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    ends = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("imported:")]
    assert done.stdout.count("Usage:") == 1 + len(COMMANDS)
    assert len(ends) == len(helped) + len(wrong)
    for line, imported in zip(helped, ends, strict=False):
        assert imported.isdisjoint(OPTIONS), line
    assert "not valid YAML" in done.stderr
    assert ends[-1].isdisjoint(FILES)


def test_the_process_of_a_template_imports_what_renders_it() -> None:
    code = "import sys; own = set(sys.modules); import prefillcli.prompts.sandbox; print(*sys.modules.keys() - own)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()} - sys.stdlib_module_names
    assert packages == {"jinja2", "markupsafe", "prefillcli"}


def test_an_output_that_is_there_is_told_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Is it? Answer:"}\n')
    monkeypatch.chdir(tmp_path)
    assert score("in.jsonl")["exit_code"] == 0
    report = (tmp_path / "out.run.json").read_bytes()
    words = [sys.executable, "-c", RUN, json.dumps([["score", "in.jsonl", "-o", "out.parquet"]])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    summary, code, heavy = done.stdout.splitlines()
    assert "out.parquet is complete\ncontinue with --resume" in json.loads(summary)["error"]
    assert (code, json.loads(heavy)) == ("2", [])
    assert (tmp_path / "out.run.json").read_bytes() == report
    (tmp_path / "in.jsonl").write_text('{"prompt": "Was it? Answer:"}\n')  # that is another job
    assert score("in.jsonl")["exit_code"] == 4


SCORE = """
import sys
from importlib.util import find_spec
from prefillcli.cli import main
try:
    main()
finally:
    print([name for name in ("sklearn", "scipy", "torchao", "boto3") if name in sys.modules])
    import scipy, sklearn
    from transformers.utils import is_torchao_available
    print(is_torchao_available() == (find_spec("torchao") is not None))
"""


def test_a_job_imports_nothing_that_no_causal_language_model_needs(tmp_path: Path) -> None:
    """transformers would import these, since they are installed here; others find them afterwards as ever."""
    assert all(map(find_spec, ("sklearn", "scipy", "torchao", "boto3")))
    (tmp_path / "in.jsonl").write_text('{"prompt": "Is it? Answer:"}\n')
    command = [sys.executable, "-c", SCORE, "score", "in.jsonl", "-m", str(SAMPLES / "models" / "target")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[1:] == ["[]", "True"]
