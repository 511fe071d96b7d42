"""Jobs over rows with images have the answers of transformers' whole forward, however they run."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import prefillcli
from prefillcli.engines.images import PackImages
from prefillcli.errors import UsageError
from prefillcli.options.commands import BenchSettings, FitSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.bench.bench_job import bench_job
from prefillcli.tools.fit.fit_job import fit_job
from tests.jobs.answers import assert_answer
from tests.jobs.image_rows import (
    BROKEN,
    COLUMNS,
    LABELS,
    ROWS,
    TEXTS,
    Whole,
    columns,
    file_of,
    make_steady,
    picture,
    pictures_of,
    url_of,
    write_rows,
)
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.jobs.test_shards import merge

ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
#: Images in tiles; positions in three axes; with features in early layers, or states; attention both ways; any size.
FAMILIES = ("smolvlm", "qwen2_vl", "qwen3_vl", "qwen3_5", "gemma3", "mistral3")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


@pytest.fixture(
    scope="module",
    params=[each if each == "smolvlm" else pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES],
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole("smolvlm", tmp_path_factory.mktemp("models") / "smolvlm")


def flags(whole: Whole, **more: Any) -> dict[str, Any]:
    given = {"model": whole.folder, "id_column": "id", "image_column": COLUMNS, "labels": ",".join(LABELS)}
    return given | {"max_error_rate": 0.5, "memory": "256MiB"} | more


def words(whole: Whole, *more: object) -> list[object]:
    """The same for a command."""
    columns = [f"--image-column={name}" for name in COLUMNS]
    given = ["--id-column", "id", *columns, "--labels", ",".join(LABELS), "--max-error-rate", 0.5]
    return ["score", "in.parquet", "-m", whole.folder, *given, "--pack-tokens", 200, "-o", "out.parquet", *more]


def assert_answered(rows: Sequence[dict[str, Any]], whole: Whole, tolerance: float = TOLERANCE) -> None:
    """All rows have the reference's answers, but for those that are broken."""
    assert sorted(row["id"] for row in rows) == sorted(f"r{row}" for row in range(ROWS))
    for row in rows:
        broken = BROKEN.get(int(row["id"][1:]))
        if broken is not None:
            assert row["error"] == "invalid_image"
            assert f"column {broken}: " in row["error_detail"]
            continue
        assert row["error"] is None, row["error_detail"]
        answer = whole.answers[row["id"]]
        assert row["score"] == pytest.approx(answer.score, abs=tolerance)
        assert row["label_mass"] == pytest.approx(answer.label_mass, abs=tolerance)
        assert row["prompt_tokens"] == answer.prompt_tokens
    spread = [answer.score for answer in whole.answers.values()]
    assert max(spread) - min(spread) > 0.05


def test_a_job_has_the_answers_of_the_whole_model(whole: Whole) -> None:
    assert score(write_rows(), **flags(whole))["exit_code"] == 0
    assert_answered(read_output("out.parquet"), whole)
    report = read_report()
    assert report["rows"]["errors_by_code"] == {"invalid_image": len(BROKEN)}
    assert report["tokens"]["computed"] < report["tokens"]["prompt"]


def merged(whole: Whole) -> list[dict[str, Any]]:
    for number in (1, 2):
        assert score("in.parquet", "shards.parquet", shard=f"{number}/2", **flags(whole))["exit_code"] == 0
    assert merge("shards.parquet")["exit_code"] == 0
    return read_output("shards.parquet")


def stopped(signum: int, *more: object, **options: Any) -> Callable[[Whole], list[dict[str, Any]]]:
    """A job that is ended by a signal in its third pack, and goes on."""

    def run(whole: Whole) -> list[dict[str, Any]]:
        command = Command(*words(whole, *more), hold=Hold(ANSWER, 3), grace_seconds=0.2)
        command.wait_until_held()
        if signum == signal.SIGKILL:
            command.kill()
        else:
            command.send(signum)
            assert command.end() == 128 + signum, command.stderr
        assert score("in.parquet", resume=True, **flags(whole, pack_tokens=200, **options))["exit_code"] == 0
        return read_output("out.parquet")

    return run


def job(**more: Any) -> Callable[[Whole], list[dict[str, Any]]]:
    def run(whole: Whole) -> list[dict[str, Any]]:
        summary = score("in.parquet", **flags(whole, **more))
        assert summary["exit_code"] == 0, summary
        return read_output("out.parquet")

    return run


WAYS: dict[str, Callable[[Whole], list[dict[str, Any]]]] = {
    "small packs": job(pack_tokens=150, chunk_tokens=16),
    "two workers": job(workers=2, pack_tokens=200),
    "no prefix is kept": job(pack_tokens=150, prefix_kv="discard"),
    "prefixes in host memory": job(pack_tokens=150, prefix_kv="offload"),
    "deterministic": job(deterministic=True, pack_tokens=200),
    "two shards": merged,
    "killed and resumed": stopped(signal.SIGKILL),
    "stopped and resumed": stopped(signal.SIGTERM),
}
OFTEN = ("small packs",)


@pytest.mark.parametrize(
    "way", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.nightly) for each in WAYS]
)
def test_a_job_has_these_answers_however_it_runs(whole: Whole, way: str) -> None:
    write_rows()
    assert_answered(WAYS[way](whole), whole)


def bits_of(rows: Sequence[dict[str, Any]]) -> dict[str, bytes]:
    names = ("score", "logprob_y", "logprob_n", "label_mass")
    return {row["id"]: np.array([row[name] for name in names], dtype=float).tobytes() for row in rows}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_rows_have_the_same_bits_in_another_order(whole: Whole, dtype: str) -> None:
    given = flags(whole, dtype=dtype, deterministic=True)
    assert score(write_rows(), **given, threads=1)["exit_code"] == 0
    write_rows("other.parquet", range(ROWS - 1, -1, -1))
    assert score("other.parquet", "other-out.parquet", **given, threads=2, pack_tokens=150)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert bits_of(read_output("other-out.parquet")) == bits_of(rows)
    assert_answered(rows, whole, tolerance=TOLERANCE if dtype == "float32" else 0.05)


@pytest.mark.nightly
def test_a_job_whose_weights_are_streamed_has_these_answers(whole: Whole) -> None:
    assert score(write_rows(), **flags(whole, weights="stream"))["exit_code"] == 0
    assert read_report()["weights"]["mode"] == "stream"
    assert_answered(read_output("out.parquet"), whole)


@pytest.mark.nightly
def test_a_job_in_bfloat16_has_nearly_these_answers(whole: Whole) -> None:
    assert score(write_rows(), **flags(whole, dtype="bfloat16"))["exit_code"] == 0
    assert_answered(read_output("out.parquet"), whole, tolerance=0.05)


@pytest.mark.nightly
def test_rows_with_images_leave_early(tmp_path: Path) -> None:
    steady = Whole("qwen3_vl", tmp_path / "steady")
    make_steady(steady.folder)
    data = {"prompt": [f"Is it shoe {row}?" for row in range(300)], "photo": [file_of(row % 40) for row in range(300)]}
    source = write_parquet("many.parquet", **data)
    labels = ("c", "i")  # each the answer to half of them
    given = {"model": steady.folder, "image_column": "photo", "labels": ",".join(labels), "dtype": "float32"}
    assert score(source, "full.parquet", **given)["exit_code"] == 0
    rows = read_output("full.parquet")
    for row in (0, 41, 299):
        said = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": data["prompt"][row]}]}]
        wanted = steady.answer(said, [picture(row % 40)], labels)
        assert rows[row]["score"] == pytest.approx(wanted.score, abs=TOLERANCE)
    given |= {"max_flips": 0.1, "exit_rows": 150}
    for ways in ({"exit": True}, {}):  # or all that this machine has
        assert score(source, "early.parquet", **given, **ways, overwrite=True)["exit_code"] == 0
        early = read_output("early.parquet")
        assert sum(row["exit_layer"] is not None for row in early) > 30
        assert sum(row["prediction"] != own["prediction"] for row, own in zip(early, rows, strict=True)) <= 30


QUESTIONS = [f"Is thing {number} in it?" for number in range(10)]


def test_questions_about_an_image_read_it_once(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    features = PackImages._features
    monkeypatch.setattr(PackImages, "_features", lambda self, own: encoded.extend(own) or features(self, own))
    asked = [{"name": f"q{at}", "text": text, "labels": list(LABELS)} for at, text in enumerate(QUESTIONS)]
    Path("q.json").write_text(json.dumps({"document": "{{ prompt }}", "questions": asked}))
    source = write_parquet(
        "in.parquet", prompt=["A photo. ", "A photo. ", "Two. "], photo=[file_of(1), file_of(2), file_of(1)]
    )
    given = {"model": whole.folder, "image_column": "photo"}
    assert score(source, questions="q.json", **given)["exit_code"] == 0
    rows = read_output("out.parquet")
    for row, (text, number) in zip(rows, [("A photo. ", 1), ("A photo. ", 2), ("Two. ", 1)], strict=True):
        for at, question in enumerate(QUESTIONS):
            wanted = whole.of_pictures(text + question, [number])
            assert_answer(row, f"q{at}", dict(zip(LABELS, map(math.exp, wanted.logprobs), strict=True)))
    assert len(encoded) == len({each.image.key for each in encoded}) == 2
    computed = read_report()["tokens"]["computed"]
    assert (
        score(source, "one.parquet", template="{{ prompt }}Is thing 0 in it?", labels="y,n", **given)["exit_code"] == 0
    )
    assert computed < read_report("one.run.json")["tokens"]["computed"] + 3 * 10 * (len(QUESTIONS[0]) + 20)


@pytest.mark.nightly
def test_python_has_the_answers_of_the_command(whole: Whole) -> None:
    table = pq.read_table(write_rows())
    given = {"image_column": COLUMNS, "labels": ",".join(LABELS), "image_root": "."}
    found = prefillcli.score(table, whole.folder, **given)
    assert_answered(found.to_pylist(), whole)
    with prefillcli.Scorer(whole.folder, **given) as scorer:
        parts = [scorer.score(table.slice(12)).to_pylist(), scorer.score(table.slice(0, 12)).to_pylist()]
    assert_answered([*parts[0], *parts[1]], whole)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_images_are_named_in_files_of_text(whole: Whole, kind: str) -> None:
    own = columns()
    rows = [dict(zip(own, values, strict=True)) for values in zip(*own.values(), strict=True)]
    for number, row in enumerate(rows):
        for name in COLUMNS:
            at = pictures_of(number).get(name)
            if at is not None:
                row[name] = url_of(at) if name == "photo" else f"{at}.png"
            if BROKEN.get(number) == name:
                row[name] = "data:image/png;base64,!" if name == "photo" else "gone.png"
    if kind == "csv":
        with Path("in.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(own))
            writer.writeheader()
            writer.writerows(rows)
    else:
        write_jsonl("in.jsonl", rows)
    assert score(f"in.{kind}", **flags(whole))["exit_code"] == 0
    assert_answered(read_output("out.parquet"), whole)


def test_images_of_chats_stand_where_their_parts_do(whole: Whole) -> None:
    Path("2.png").write_bytes(file_of(2))
    said = {"type": "text", "text": "Is this"}
    system = {"role": "system", "content": "You look at photos."}
    chats = [
        [system, {"role": "user", "content": [said, {"type": "image_url", "image_url": {"url": url_of(1)}}, said]}],
        [
            {
                "role": "user",
                "content": [{"type": "image", "path": "2.png"}, {"type": "input_image", "image_url": url_of(1)}],
            }
        ],
        [{"role": "user", "content": [{"type": "image", "path": "gone.png"}, said]}],
        [system, {"role": "user", "content": "No image."}],
    ]
    shown = [
        ([system, {"role": "user", "content": [said, {"type": "image"}, said]}], [1]),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}], [2, 1]),
        None,
        (chats[3], []),
    ]
    write_jsonl("in.jsonl", [{"messages": chat} for chat in chats])
    assert score("in.jsonl", model=whole.folder, labels="y,n", max_error_rate=0.5)["exit_code"] == 0
    for row, wanted in zip(read_output("out.parquet"), shown, strict=True):
        if wanted is None:
            assert row["error"] == "invalid_image"
            continue
        messages, numbers = wanted
        answer = whole.answer(messages, list(map(picture, numbers)))
        assert row["score"] == pytest.approx(answer.score, abs=TOLERANCE)
        assert row["prompt_tokens"] == answer.prompt_tokens


def test_only_rows_with_changed_pictures_are_scored_again(smolvlm: Whole) -> None:
    Path("a.png").write_bytes(file_of(1))
    Path("b.png").write_bytes(file_of(2))
    source = write_parquet("in.parquet", id=["a", "b"], prompt=[TEXTS[0]] * 2, photo=["a.png", "b.png"])
    given = {"model": smolvlm.folder, "id_column": "id", "image_column": "photo", "labels": "y,n"}
    assert score(source, "last.parquet", **given)["exit_code"] == 0
    Path("b.png").write_bytes(file_of(3))
    assert score(source, **given, since="last.parquet")["exit_code"] == 0
    before, after = read_output("last.parquet"), read_output("out.parquet")
    assert [row["score"] for row in after] == pytest.approx(
        [smolvlm.of_pictures(TEXTS[0], [number]).score for number in (1, 3)], abs=TOLERANCE
    )
    assert before[0] == after[0], "also its seconds: it is taken over"
    assert read_report()["tokens"]["prompt"] == after[1]["prompt_tokens"]


@pytest.mark.nightly
def test_a_row_is_tried_again_when_its_picture_is_there(smolvlm: Whole) -> None:
    Path("a.png").write_bytes(file_of(1))
    source = write_parquet("in.parquet", id=["a", "b"], prompt=[TEXTS[0]] * 2, photo=["a.png", "b.png"])
    given = {"model": smolvlm.folder, "id_column": "id", "image_column": "photo", "labels": "y,n"}
    assert score(source, **given, max_error_rate=0.5)["rows"]["errors_by_code"] == {"invalid_image": 1}
    first = read_output("out.parquet")[0]
    Path("b.png").write_bytes(file_of(2))
    assert score(source, **given, retry_errors=True)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert rows[0] == first
    assert rows[1]["score"] == pytest.approx(smolvlm.of_pictures(TEXTS[0], [2]).score, abs=TOLERANCE)


@pytest.mark.nightly
def test_a_resumed_job_is_refused_where_the_images_may_be_others(
    smolvlm: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_parquet("in.parquet", prompt=[TEXTS[0]] * 2, photo=[file_of(1)] * 2, other=[file_of(2)] * 2)
    given = {"model": smolvlm.folder, "labels": "y,n"}
    assert score(source, image_column="photo", **given)["exit_code"] == 0
    for changed in ({"image_column": "other"}, {"image_column": ("photo", "other")}, {}):
        assert score(source, resume=True, **given, **changed)["exit_code"] == 4
        assert "belongs to another job" in capsys.readouterr().err


SECRETS = ("hunter2", "AKIAEXAMPLE", "s3cr3tsig")


def test_nothing_of_an_image_or_its_url_is_shown(smolvlm: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [
        "https://me:hunter2@127.0.0.1:1/a.png",
        "http://127.0.0.1:1/a.png?X-Amz-Credential=AKIAEXAMPLE&X-Amz-Signature=s3cr3tsig",
        "http://127.0.0.1:1/a.png?sig=s3cr3tsig&token=hunter2",
        "s3://me:hunter2@bucket/a.png",
        url_of(1)[:-30] + "!",
        url_of(1),
    ]
    source = write_jsonl("in.jsonl", [{"prompt": TEXTS[0], "photo": url} for url in urls])
    given = {"model": smolvlm.folder, "image_column": "photo", "labels": "y,n", "max_error_rate": 1.0}
    for more in ({}, {"allow_urls": True, "rejects": "rejects.jsonl"}):
        assert score(source, overwrite=True, **given, **more)["exit_code"] == 0
        errors = [row["error"] for row in read_output("out.parquet")]
        assert errors == ["invalid_image"] * 5 + [None]
        said = capsys.readouterr()
        shown = [
            said.out,
            said.err,
            str(read_output("out.parquet")),
            *(each.read_text() for each in Path().glob("out.run.*")),
        ]
        for text in shown:
            assert not [secret for secret in SECRETS if secret in text]
            assert url_of(1)[40:80] not in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"engine": "hf"}, "the hf engine has no images"),
        ({"draft": "self", "keep": 0.5}, "the tokens of an image are read together"),
        ({"first": "words", "max_flips": 0.1}, "the models that read first read texts alone"),
        ({"max_pixels": 9}, "smolvlm's processor has no such settings"),
        ({"image_column": "nowhere"}, "no column 'nowhere'"),
    ],
)
def test_what_cannot_work_is_refused(
    smolvlm: Whole, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    write_rows()
    try:
        assert score("in.parquet", **flags(smolvlm, **more))["exit_code"] == 2
        found = capsys.readouterr().err
    except UsageError as error:
        found = str(error)
    assert said in found
    assert len(found.splitlines()) <= 3


def test_a_broken_processor_is_a_message(smolvlm: Whole, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows()
    broken = shutil.copytree(smolvlm.folder, tmp_path / "broken")
    for text, said in (("{", "its image processor cannot be opened"), (None, "neither preprocessor_config.json")):
        for name in ("preprocessor_config.json", "processor_config.json"):
            (broken / name).unlink() if text is None else (broken / name).write_text(text)
        assert score("in.parquet", **flags(smolvlm, model=broken))["exit_code"] == 2
        assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_bench_compares_methods_that_see(smolvlm: Whole) -> None:
    write_rows()
    given = {name: each for name, each in flags(smolvlm).items() if name not in ("id_column", "max_error_rate")}
    given |= {"model": str(smolvlm.folder), "inputs": ["in.parquet"], "output": "bench.json", "quiet": True}
    summary = bench_job(load_settings(BenchSettings, given, environment={}))
    assert (summary["exit_code"], list(summary["workloads"]["in.parquet"])) == (0, ["hybrid"])
    blind = bench_job(load_settings(BenchSettings, given | {"method": "hf"}, environment={}))
    assert blind["exit_code"] == 2
    assert "--method hf: it reads texts alone" in blind["error"]


def shaded(number: int, light: bool) -> bytes:
    noise = np.random.default_rng(number).integers(0, 60, (32, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise + np.uint8(190 if light else 0)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.nightly
def test_heads_are_fitted_to_images(whole: Whole) -> None:
    def rows(first: int, count: int) -> dict[str, list[Any]]:
        kinds = ["light" if row % 2 else "dark" for row in range(count)]
        pictures = [shaded(first + row, kind == "light") for row, kind in enumerate(kinds)]
        return {"prompt": [TEXTS[0]] * count, "photo": pictures, "kind": kinds}

    source = write_parquet("judged.parquet", **rows(0, 40))
    given = {"model": str(whole.folder), "inputs": [str(source)], "output": "a.head", "quiet": True}
    given |= {"image_column": "photo", "truth": "kind", "labels": "light,dark", "most_layers": 2, "keep_worse": True}
    assert fit_job(load_settings(FitSettings, given, environment={}))["exit_code"] == 0
    fresh = rows(40, 20)
    asked = write_parquet("fresh.parquet", **fresh)
    assert score(asked, model=whole.folder, image_column="photo", labels="light,dark", head="a.head")["exit_code"] == 0
    assert [row["prediction"] for row in read_output("out.parquet")] == fresh["kind"], "the texts are all equal"
