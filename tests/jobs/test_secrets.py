"""What opens a bucket is in nothing that a run prints or leaves behind."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from prefillcli.cli import app
from prefillcli.errors import HIDDEN, without_secrets
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.option import details_of
from tests.jobs.jobs import texts, write_jsonl, write_parquet

KEY, SECRET, SIGNATURE = "AKIAEXAMPLE", "wJalr/XUtnFEMI+K7", "d0bf7bb68b5f"
OTHER = {KEY: "AKIAROTATED", SECRET: "tY9/rotated+1", SIGNATURE: "0aa11bb22cc3"}


class Vault(MemoryFileSystem):
    """A filesystem whose URLs hold a key, a secret and a signature, like those of object stores."""

    protocol = "vault"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("vault://").rpartition("@")[2].partition("?X-Amz")[0].strip("/")
        return f"/{path}" if path else ""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "broken" in path and "r" in mode:
            raise OSError(f"403 Forbidden: {KEY}:{SECRET}@{path}?X-Amz-Signature={SIGNATURE}&X-Amz-Date=1 was refused")
        return super()._open(path, mode, **options)


@pytest.fixture(autouse=True)
def vault() -> Iterator[Vault]:
    fsspec.register_implementation("vault", Vault, clobber=True)
    filesystem = Vault()
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def url(path: str, *, signed: bool = False, rotated: bool = False) -> str:
    query = f"?X-Amz-Date=1&X-Amz-Signature={SIGNATURE}" if signed else ""
    text = f"vault://{KEY}:{SECRET}@{path}{query}"
    for old, new in OTHER.items() if rotated else ():
        text = text.replace(old, new)
    return text


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def assert_no_secret(filesystem: Vault, folder: Path, printed: str) -> None:
    left = {name: file.getvalue() for name, file in filesystem.store.items()}
    left |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for secret in (KEY, SECRET, SIGNATURE, *OTHER.values()):
        assert secret not in printed
        for name, content in left.items():
            assert secret not in name
            assert secret.encode() not in content, name


@pytest.mark.parametrize("output", ["out.jsonl", "folder/"])
def test_a_run_shows_no_secret_and_goes_on_with_new_ones(
    model: Path, vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    vault.pipe_file("/bucket/in.jsonl", write_jsonl("in.jsonl", [{"prompt": text} for text in texts(5)]).read_bytes())
    vault.pipe_file("/bucket/more.txt", b"x")
    given = ["-m", model, "--metrics-file", url("bucket/m.prom"), "--report", url("bucket/r.json")]
    given += ["-o", url(f"bucket/{output}"), "--engine-options", "hf_token=x"][:2]
    assert run("score", url("bucket/in.jsonl", signed=True), *given) == 0
    rotated = [str(word).replace(KEY, OTHER[KEY]).replace(SECRET, OTHER[SECRET]) for word in given]
    assert run("score", url("bucket/in.jsonl", signed=True, rotated=True), *rotated, "--resume") == 0
    assert run("score", url("bucket/in.jsonl", signed=True), *given) == 2, "it exists"
    assert run("score", url("bucket/in.jsonl"), *given, "--overwrite", "--temperature", 2, "--dry-run") == 0
    assert run("score", url("bucket/in.jsonl"), *given, "--resume", "--temperature", 2) == 4
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[0])["output"] == f"vault://{HIDDEN}@bucket/{output}"
    assert HIDDEN in vault.cat_file("/bucket/r.json").decode()
    assert_no_secret(vault, tmp_path, out + err)


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_shows_no_secret(
    model: Path, vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    source = write_parquet("in.parquet", prompt=texts(2))
    vault.pipe_file("/bucket/in.parquet", source.read_bytes())
    vault.pipe_file("/bucket/broken.parquet", source.read_bytes())
    more = ["--debug"] if debug else []
    for arguments in (
        [url("bucket/missing.parquet"), "-m", model],
        [url("bucket/broken.parquet", signed=True), "-m", model],
        [url("bucket/in.parquet"), "-m", url("bucket/model")],
        [url("bucket/in.parquet"), "-m", model, "--draft", url("bucket/draft"), "--keep", 0.5],
        [url("bucket/in.parquet"), "-m", model, "--template", url("bucket/template.j2")],
        [url("bucket/in.txt"), "-m", model],
        [url("bucket/in.parquet"), "-m", model, "--prompt-column", "nosuch"],
        [url("bucket/in.parquet"), "-m", model, "-o", url("bucket/out.xlsx")],
        [url("bucket/in.parquet").replace("vault", "nosuch"), "-m", model],
    ):
        assert run("score", *arguments, *more) in (1, 2)
    out, err = capsys.readouterr()
    assert "403 Forbidden" in err
    assert_no_secret(vault, tmp_path, out + err)


PATHS = [name for name in ScoreSettings.options() if details_of(ScoreSettings, name).path not in (None, "rows")]


@pytest.mark.parametrize("name", PATHS)
def test_no_option_that_names_a_path_leaves_its_secrets_behind(
    model: Path, vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, output = write_parquet("in.parquet", id=["a", "b"], prompt=texts(2)), tmp_path / "out.parquet"
    given = {"model": model, "output": output, "id_column": "id", name: url(f"bucket/{name}.jsonl")}
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    more = {"draft": ["--keep", 0.5], "exit_profile": ["--exit"], "drift_from": ["--max-drift", 0.1]}
    more["review"] = ["--review-below", 0.9]
    run("score", source, *words, *more.get(name, []))
    run("score", source, *words, *more.get(name, []), "--overwrite", "--log-format", "json")
    out, err = capsys.readouterr()
    left = "".join(path.read_text() for path in tmp_path.glob("*.json"))
    left += "".join(file.getvalue().decode(errors="ignore") for file in vault.store.values())
    assert f"{HIDDEN}@bucket/{name}.jsonl" in out + err + left
    assert_no_secret(vault, tmp_path, out + err)


def test_the_report_and_page_of_rows_taken_over_hide_the_secrets_of_where_they_were(
    model: Path, vault: Vault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, earlier = write_parquet("in.parquet", id=["a", "b"], prompt=texts(2)), url("bucket/night.parquet")
    given = ["-m", model, "--id-column", "id"]
    assert run("score", source, *given, "-o", earlier) == 0
    assert run("score", source, *given, "-o", tmp_path / "out.parquet", "--since", earlier) == 0
    out, err = capsys.readouterr()
    since = json.loads((tmp_path / "out.run.json").read_text())["since"]
    assert since["output"] == f"vault://{HIDDEN}@bucket/night.parquet"
    assert since["rows"] == 2
    assert_no_secret(vault, tmp_path, out + err)


def test_a_damaged_work_folder_is_told_of_without_secrets(
    model: Path, vault: Vault, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    vault.pipe_file("/bucket/in.jsonl", write_jsonl("in.jsonl", [{"prompt": text} for text in texts(2)]).read_bytes())
    vault.pipe_file("/bucket/out.parquet.prefill/manifest.json", b"{")
    run("score", url("bucket/in.jsonl"), "-m", model, "-o", url("bucket/out.parquet"), "--resume")
    out, err = capsys.readouterr()
    assert SECRET not in out + err + caplog.text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("s3://key:secret@bucket/a.parquet", "s3://***@bucket/a.parquet"),
        ("s3://key:sec/ret@bucket/a@2.parquet", "s3://***@bucket/a@2.parquet"),
        ("postgres://u:p@ss@host/x", "postgres://***@host/x"),
        ("https://ghp_token@host/x", "https://***@host/x"),
        ("simplecache::s3://key:secret@bucket/a", "simplecache::s3://***@bucket/a"),
        ("https://h/a.parquet?X-Amz-Signature=1f&X-Amz-Date=2", "https://h/a.parquet?X-Amz-Signature=***&X-Amz-Date=***"),
        ("https://h/a?sv=1&sig=a%2Fb#frag=x", "https://h/a?sv=***&sig=***#frag=***"),
        ("s3://b/a?region=eu-1&secret_key=x", "s3://b/a?region=eu-1&secret_key=***"),
        ("no access to bucket/a?X-Amz-Signature=1f here", "no access to bucket/a?X-Amz-Signature=*** here"),
        ("FileNotFoundError: key:secret@bucket/a", "FileNotFoundError: ***@bucket/a"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(text: str, safe: str) -> None:
    assert without_secrets(text) == safe
    assert without_secrets(safe) == safe


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/day-?.parquet",
        "s3://bucket/a@2.parquet",
        "http://host:9000/a@2.parquet",
        "abfs://container@account.dfs.core.windows.net/a.parquet",
        "/data/a=1/b@c.parquet",
        "gs://bucket/date=2024-01-01/part.parquet",
        "3 of 4 rows are errors (null_prompt 3); --max-error-rate allows 0",
    ],
)
def test_places_without_secrets_stay_as_they_are(text: str) -> None:
    assert without_secrets(text) == text
