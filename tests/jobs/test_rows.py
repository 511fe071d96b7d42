"""One row out for every row in: what cannot be scored says why, ids and kept columns come along."""

from __future__ import annotations

import datetime
import json
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from prefillcli.tools.status import status_job
from tests.jobs.jobs import (
    TOLERANCE,
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)

RESULTS = ("score", "logprob_Yes", "logprob_No", "label_mass", "prediction", "computed_tokens", "method")


def assert_error_rows_are_empty(rows: list[dict]) -> None:
    for row in rows:
        if row["error"] is not None:
            assert [row[name] for name in RESULTS] == [None] * len(RESULTS)
            assert row["error_detail"]
        else:
            assert None not in [row[name] for name in RESULTS]


def test_a_bad_line_is_an_error_row_of_its_own(model: Path, reference: Reference) -> None:
    good = texts(2)
    lines = {
        None: {"id": "a", "prompt": good[0]},
        "null_prompt": {"id": "b", "prompt": None},
        "empty_prompt": {"id": "c", "prompt": " \n"},
        "wrong_type": {"id": "d", "prompt": 7},
        "invalid_utf8": b'{"id": "e", "prompt": "caf\xe9"}',
        "invalid_json": b'{"id": "f", "prompt": "x"',
        "missing_column": {"id": "g", "text": "x"},
        "prompt_too_long": {"id": "h", "prompt": "fox " * 200},
        "duplicate_id": {"id": "a", "prompt": good[1]},
        "null_id": {"prompt": good[1]},
    }
    more = [b'{"id": "i", "prompt": "\\ud800"}', b"[1, 2]", {"id": "j", "prompt": good[1]}]
    source = write_jsonl("in.jsonl", [*lines.values(), *more])
    summary = score(source, model=model, id_column="id", max_length=120, empty_text="error")
    rows = read_output("out.parquet")
    codes = [row["error"] for row in rows]
    assert codes == [*lines, "invalid_utf8", "wrong_type", None]
    assert_error_rows_are_empty(rows)
    assert_scored([row for row in rows if row["error"] is None], [reference.answer(text) for text in good])
    assert [row["id"] for row in rows][:4] == ["a", "b", "c", "d"]
    assert summary["exit_code"] == 3
    counts = read_report()["rows"]
    assert (counts["total"], counts["scored"], counts["errors"], counts["skipped"]) == (13, 2, 11, 0)
    assert sum(counts["errors_by_code"].values()) == 11
    assert counts == summary["rows"]


def test_a_bad_parquet_row_is_an_error_row_of_its_own(model: Path, reference: Reference) -> None:
    good = texts(2)
    values = [good[0].encode(), None, b"", b"  ", b"caf\xe9", b"fox " * 200, good[1].encode()]
    source = write_parquet("in.parquet", prompt=pa.array(values, pa.binary()), id=[1, 2, 3, 4, 5, 6, 1])
    score(source, model=model, id_column="id", max_length=60)
    rows = read_output("out.parquet")
    assert [row["error"] for row in rows] == [
        None,
        "skipped_empty",
        "skipped_empty",
        "skipped_empty",
        "invalid_utf8",
        "prompt_too_long",
        "duplicate_id",
    ]
    assert_error_rows_are_empty(rows)
    assert_scored(rows[:1], [reference.answer(good[0])])
    assert [row["id"] for row in rows] == [1, 2, 3, 4, 5, 6, 1]


@pytest.mark.parametrize(
    ("column", "value", "code"),
    [
        ("prompt", 1.5, "wrong_type"),
        ("prompt_token_ids", [1, 400], "invalid_token_ids"),
        ("messages", [{"role": "user"}], "chat_error"),
        ("messages", ["user"], "wrong_type"),
    ],
)
def test_values_that_are_no_prompt(chat_model: Path, column: str, value: object, code: str) -> None:
    good = {"prompt": "fox", "prompt_token_ids": [5, 6, 7], "messages": [{"role": "user", "content": "fox"}]}
    source = write_jsonl("in.jsonl", [{column: good[column]}, {column: value}])
    assert score(source, model=chat_model)["exit_code"] == 3
    assert [row["error"] for row in read_output("out.parquet")] == [None, code]


def test_a_template_that_fails_on_a_row_is_an_error_row(model: Path) -> None:
    source = write_jsonl("in.jsonl", [{"a": "fox", "b": {"c": "dog"}}, {"a": "fox", "b": None}, {"a": "fox"}])
    score(source, model=model, template="{{ a }} {{ b.c.upper() }}:")
    assert [row["error"] for row in read_output("out.parquet")] == [None, "template_error", "missing_column"]


@pytest.mark.parametrize(("on_long", "codes"), [("error", ["prompt_too_long"]), ("skip", ["skipped_too_long"])])
def test_long_prompts_are_errors_or_skipped(model: Path, on_long: str, codes: list[str]) -> None:
    source = write_parquet("in.parquet", prompt=["fox " * 50, "fox"])
    summary = score(source, model=model, max_length=20, on_long=on_long)
    assert [row["error"] for row in read_output("out.parquet")] == [*codes, None]
    assert summary["exit_code"] == (3 if on_long == "error" else 0)
    assert summary["rows"]["skipped"] == (0 if on_long == "error" else 1)
    assert summary["rows"]["errors"] == (1 if on_long == "error" else 0)


@pytest.mark.parametrize("output", ["out.parquet", "out.csv"])
def test_rows_without_text_are_counted_apart_and_are_no_errors(model: Path, output: str) -> None:
    source = write_jsonl(
        "in.jsonl", [{"prompt": text, "id": at} for at, text in enumerate(["fox", None, "", " \t", 7])]
    )
    given: dict[str, Any] = {"model": model, "id_column": "id", "rejects": "bad.jsonl"}
    summary = score(source, output, **given, max_error_rate=0.2)
    assert summary["exit_code"] == 0
    counted = {"total": 5, "scored": 1, "errors": 1, "skipped": 0, "empty": 3, "errors_by_code": {"wrong_type": 1}}
    assert summary["rows"] == counted == read_report(summary["report"])["rows"]
    rows = read_output(output)
    assert [row["error"] for row in rows] == [None, *["skipped_empty"] * 3, "wrong_type"]
    assert_error_rows_are_empty(rows)
    assert [row["id"] for row in read_output("bad.jsonl")] == [4]
    page = Path(summary["page"]).read_text()
    assert "3 empty" in page or ">empty<" in page
    assert status_job(output, quiet=True)["rows"]["empty"] == 3
    # No error row is left to be scored again, and another treatment of such rows is another job.
    assert score(source, output, **given, max_error_rate=0.2, resume=True)["exit_code"] == 0
    assert score(source, output, **given, empty_text="error", resume=True)["exit_code"] == 4


def test_a_file_of_empty_texts_alone_is_no_success(model: Path) -> None:
    summary = score(write_parquet("in.parquet", prompt=[None, "", " "]), model=model)
    assert (summary["exit_code"], summary["status"]) == (1, "failed")
    assert summary["error"] == "no row was scored: 3 have no text (--empty-text skip)"


@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-middle"])
def test_truncated_prompts_are_scored_and_flagged(model: Path, reference: Reference, on_long: str) -> None:
    prompts = [text + " and " + texts(9)[-1] for text in texts(5)] + ["fox"]
    source = write_parquet("in.parquet", prompt=prompts)
    assert score(source, model=model, max_length=25, on_long=on_long)["exit_code"] == 0
    rows = read_output("out.parquet")
    for row, text in zip(rows, prompts, strict=True):
        ids = reference.ids(text)
        cut = ids[:1] + ids[-24:] if on_long == "truncate-left" else ids[:12] + ids[-13:]
        kept = cut if len(ids) > 25 else ids
        assert abs(row["score"] - reference.answer(kept).score) < TOLERANCE
        assert row["truncated"] is (len(ids) > 25)
        assert row["prompt_tokens"] == len(kept)


def test_a_prompt_beyond_the_models_own_limit_is_an_error(model: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt_token_ids": [5] * 2049}, {"prompt_token_ids": [5] * 9}])
    score(source, model=model, max_length=10_000)
    assert [row["error"] for row in read_output("out.parquet")] == ["prompt_too_long", None]


def test_a_model_that_answers_with_no_number_gives_error_rows(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    source = write_jsonl("in.jsonl", [{"prompt": text} for text in texts(4)])
    assert score(source, model=broken)["exit_code"] == 1
    assert [(row["error"], row["score"]) for row in read_output("out.parquet")] == [("nonfinite_score", None)] * 4
    assert read_report()["first_answers"] == []


def test_a_row_whose_answer_is_no_number_says_nothing_of_the_first_answers(model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    good, bad = {"prompt_token_ids": [5] * 9}, {"prompt_token_ids": [7] * 9}
    score(write_jsonl("good.jsonl", [good]), "good.parquet", model=broken)
    score(write_jsonl("in.jsonl", [bad, good]), model=broken, max_error_rate=1)
    assert [row["error"] for row in read_output("out.parquet")] == ["nonfinite_score", None]
    (found,), (alone,) = (read_report(path)["first_answers"] for path in ("out.run.json", "good.run.json"))
    assert found["rows"] == 1
    assert found["begins"] == pytest.approx(alone["begins"])
    assert found["label_mass"] == pytest.approx(alone["label_mass"])


def test_a_prompt_beyond_the_memory_budget_is_an_error(model: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt_token_ids": [5] * 2000}, {"prompt_token_ids": [5] * 9}])
    score(source, model=model, memory="48.5MiB", chunk_tokens=16)
    assert [row["error"] for row in read_output("out.parquet")] == ["exceeds_memory", None]


def test_parquet_types_of_id_and_kept_columns_are_carried(model: Path) -> None:
    columns = {
        "key": pa.array(["x", "y", "z"]),
        "small": pa.array([1, None, 3], pa.int32()),
        "half": pa.array([0.5, None, 1.5], pa.float32()),
        "day": pa.array([datetime.date(2024, 1, i) for i in (1, 2, 3)]),
        "at": pa.array([1, 2, 3], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal("1.10")] * 3, pa.decimal128(10, 2)),
        "tags": pa.array([["a"], [], None]),
        "pair": pa.array([{"a": 1, "b": "x"}, None, {"a": 2, "b": None}]),
        "flag": pa.array([True, None, False]),
    }
    source = write_parquet("in.parquet", prompt=["fox", None, "dog"], **columns)
    score(source, model=model, id_column="key", keep_columns=[name for name in columns if name != "key"])
    found = pq.read_table("out.parquet")
    assert found.column_names[: len(columns)] == list(columns)
    for name, column in columns.items():
        assert found.schema.field(name).type == column.type
        assert found[name].to_pylist() == column.to_pylist()
    assert "row" not in found.column_names


def test_ids_of_json_lines_are_compared_as_they_are_written(model: Path) -> None:
    ids = [1, "1", 1.0, "1.0", 2, True, "true", "TRUE"]
    rows = [{"id": each, "prompt": text} for each, text in zip(ids, texts(len(ids)), strict=True)]
    for output in ("out.parquet", "out.jsonl"):
        score(write_jsonl("in.jsonl", rows), output, model=model, id_column="id", max_error_rate=1)
        found = [row["error"] for row in read_output(output)]
        assert found == [None, "duplicate_id", None, "duplicate_id", None, None, "duplicate_id", None]
    score(write_jsonl("two.jsonl", [rows[0], rows[2]]), "two.parquet", model=model, id_column="id")
    assert [(row["id"], row["error"]) for row in read_output("two.parquet")] == [("1", None), ("1.0", None)]


def test_json_values_of_id_and_kept_columns_are_carried(model: Path) -> None:
    rows = [
        {"prompt": "fox", "id": 7, "name": "ä", "x": 1.5, "n": {"a": [1, None]}, "any": 1},
        {"prompt": "dog", "id": 2**40, "name": None, "x": 2, "n": [], "any": "text"},
        {"prompt": "", "id": -1, "name": "c", "x": None, "n": None, "any": None},
    ]
    source = write_jsonl("in.jsonl", rows)
    flags = {"model": model, "id_column": "id", "keep_columns": "name,x,n,any"}
    score(source, "out.jsonl", **flags)
    for found, row in zip(read_output("out.jsonl"), rows, strict=True):
        assert {name: found[name] for name in row if name != "prompt"}.items() <= row.items()
    score(source, "out.parquet", **flags)
    table = pq.read_table("out.parquet")
    assert table["id"].to_pylist() == [7, 2**40, -1]
    assert table["name"].to_pylist() == ["ä", None, "c"]
    assert table["x"].to_pylist() == [1.5, 2.0, None]
    assert [value and json.loads(value) for value in table["n"].to_pylist()] == [{"a": [1, None]}, [], None]
    assert table["any"].to_pylist() == ["1", "text", None]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst", "parts/", "out.pq"])
def test_every_form_of_output_holds_the_same_rows(model: Path, name: str) -> None:
    source = write_parquet("in.parquet", prompt=[*texts(5), None], id=list("abcdef"))
    score(source, "wanted.parquet", model=model, id_column="id")
    summary = score(source, name, model=model, id_column="id")
    assert summary["output"] == name
    path = Path(name)
    found = pq.read_table(path).to_pylist() if name == "out.pq" else read_output(path)
    wanted = read_output("wanted.parquet")
    for row in [*found, *wanted]:
        del row["seconds"]
    assert found == wanted
    assert list(found[0]) == list(wanted[0])
    report = {"parts/": "parts.run.json", "out.pq": "out.pq.run.json"}.get(name, "out.run.json")
    assert summary["report"] == report or name == "out.pq"
    assert read_report(summary["report"])["status"] == "complete"


def test_the_output_lies_beside_the_input_by_default(model: Path) -> None:
    Path("data").mkdir()
    write_jsonl("data/in.jsonl.gz", [{"prompt": "fox"}])
    score("data/in.jsonl.gz", None, model=model)
    assert len(read_output("data/in.scores.parquet")) == 1
    assert read_report("data/in.scores.run.json")["status"] == "complete"


def test_several_files_a_directory_and_a_glob_are_read_in_order(model: Path) -> None:
    Path("data/sub").mkdir(parents=True)
    for name, ids in (("data/a.parquet", [1, 2]), ("data/b.parquet", [3]), ("data/sub/c.parquet", [4, 5])):
        write_parquet(name, prompt=[f"fox {i}" for i in ids], id=ids)
    for number, inputs in enumerate(("data", "data/**/*.parquet", ["data/a.parquet", "data/b.parquet", "data/sub"])):
        output = f"out{number}.parquet"
        score(inputs, output, model=model, id_column="id")
        assert [row["id"] for row in read_output(output)] == [1, 2, 3, 4, 5]


def test_limit_takes_the_first_rows(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(9), id=list(range(9)))
    lines = write_jsonl("in.jsonl", [{"prompt": text, "id": i} for i, text in enumerate(texts(9))])
    for path, limit in ((source, 4), (lines, 4), (source, 100)):
        summary = score(path, model=model, limit=limit, id_column="id", overwrite=True)
        assert [row["id"] for row in read_output("out.parquet")] == list(range(min(limit, 9)))
        assert summary["rows"]["total"] == min(limit, 9)


def test_sample_draws_the_same_rows_for_the_same_seed(model: Path, reference: Reference) -> None:
    prompts = texts(40)
    parquet = write_parquet("in.parquet", prompt=prompts)
    lines = write_jsonl("in.jsonl", [{"prompt": text} for text in prompts])
    drawn = []
    for source, seed in ((parquet, 0), (lines, 0), (parquet, 1)):
        score(source, model=model, sample=8, seed=seed, overwrite=True)
        rows = read_output("out.parquet")
        drawn.append([row["row"] for row in rows])
        assert_scored(rows, [reference.answer(prompts[row["row"]]) for row in rows])
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == 8
    assert drawn[0] != drawn[2]


def test_an_input_without_rows_gives_an_output_without_rows(model: Path) -> None:
    source = write_parquet("in.parquet", prompt=pa.array([], pa.string()))
    Path("in.jsonl").write_text("")
    for path in (source, "in.jsonl"):
        summary = score(path, model=model, overwrite=True)
        assert summary["exit_code"] == 1
        assert summary["mean_score"] is None
        assert pq.read_table("out.parquet").num_rows == 0
        assert score(path, model=model, overwrite=True, skip_empty=True)["exit_code"] == 99
        assert read_report()["exit_code"] == 99


def test_columns_with_commas_in_their_names_are_kept_and_right_answers(model: Path) -> None:
    write_parquet("in.parquet", **{"a,b": ["Yes", "No", "Yes"], "prompt": texts(3)})
    Path("q.yaml").write_text("questions: [{name: q, template: '{{ prompt }}', labels: [Yes, No]}]")
    more = {"questions": "q.yaml", "truth": r"q=a\,b", "overwrite": True}
    for flags in ({"keep_columns": r"a\,b,prompt"}, {"keep_columns": r"prompt,a\,b", **more}):
        assert score("in.parquet", model=model, **flags)["exit_code"] == 0
        assert pq.read_table("out.parquet")["a,b"].to_pylist() == ["Yes", "No", "Yes"]
    assert read_report()["evaluations"]["q"]["rows"] == 3


@pytest.mark.parametrize("output", ["out.parquet", "out.jsonl"])
def test_times_that_python_cannot_hold_are_carried_and_rendered_as_text(
    model: Path, reference: Reference, output: str
) -> None:
    year_10000 = 253_402_300_800
    far = pa.array([0, year_10000 * 1000, year_10000 * 1000 + 1]).view(pa.timestamp("ms"))
    tokyo = pa.array([(year_10000 - 1) * 1000, 0, 1000]).view(pa.timestamp("ms", "Asia/Tokyo"))
    unknown = pa.array([0, 1, 2]).view(pa.timestamp("us", "tzutc()"))
    nested = pa.StructArray.from_arrays([far, pa.array(texts(3))], ["at", "text"])
    kept = {"far": far, "tokyo": tokyo, "unknown": unknown, "nested": nested}
    write_parquet("in.parquet", prompt=[*texts(2), None], **kept)
    flags = {"template": "{{ far }} {{ unknown }} {{ nested.at }}: {{ prompt }}", "id_column": "far"}
    flags |= {"keep_columns": "tokyo,unknown,nested", "rationale_when": "far != tokyo", "rejects": "rejects.jsonl"}
    assert score("in.parquet", output, model=model, rationale=2, max_error_rate=0.5, **flags)["exit_code"] == 0
    far_texts = ["1970-01-01 00:00:00", "10000-01-01T00:00:00.000", "10000-01-01T00:00:00.001"]
    unknown_texts = [f"1970-01-01T00:00:00.00000{at}+00:00" for at in range(3)]
    found = read_output("out.jsonl") if output == "out.jsonl" else pq.read_table(output)
    if output == "out.jsonl":
        assert [row["far"] for row in found] == [far_texts[0].replace(" ", "T"), *far_texts[1:]]
        assert [row["tokyo"] for row in found][:2] == ["9999-12-31T23:59:59.000+00:00", "1970-01-01T09:00:00+09:00"]
        assert [row["unknown"] for row in found] == unknown_texts
        scores = [row["score"] for row in found]
    else:
        assert all(found[name].combine_chunks().equals(column) for name, column in kept.items())
        scores = found["score"].to_pylist()
    prompts = [f"{far_texts[at]} {unknown_texts[at]} {far_texts[at]}: {texts(2)[at]}" for at in range(2)]
    assert scores[:2] == pytest.approx([reference.answer(prompt).score for prompt in prompts], abs=TOLERANCE)
    (reject,) = read_output("rejects.jsonl")
    assert (reject["far"], reject["error"]) == (far_texts[2], "template_error")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_columns_that_folders_name_are_rendered_and_kept(model: Path, reference: Reference, kind: str) -> None:
    for day in (1, 2):
        Path(f"in/day={day}/user=a%20b").mkdir(parents=True)
        path = f"in/day={day}/user=a%20b/posts.{kind}"
        rows = [{"prompt": text} for text in texts(2)]
        write_jsonl(path, rows) if kind == "jsonl" else write_parquet(path, prompt=texts(2))
    template = "{{ user }} on day {{ day }}: {{ prompt }}"
    assert score("in", model=model, template=template, keep_columns="day,user")["exit_code"] == 0
    found = read_output("out.parquet")
    assert [(row["day"], row["user"]) for row in found] == [(1, "a b")] * 2 + [(2, "a b")] * 2
    assert_scored(found, [reference.answer(f"a b on day {day}: {text}") for day in (1, 2) for text in texts(2)])


def test_tokens_beyond_the_models_vocabulary_are_errors_of_their_rows(model: Path, tmp_path: Path) -> None:
    """Words that were added to the tokenizer, but not to the model: in a prompt, a choice, a target or a label."""
    larger = tmp_path / "larger"
    shutil.copytree(model, larger)
    tokenizer = AutoTokenizer.from_pretrained(larger)
    size = json.loads((larger / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([*(f"filler{number}" for number in range(size - len(tokenizer))), "covid"])
    assert tokenizer.convert_tokens_to_ids("covid") == size
    tokenizer.save_pretrained(larger)
    options = {"model": larger, "max_error_rate": 1.0, "overwrite": True}

    def errors(**flags: Any) -> list[str | None]:
        assert score("in.jsonl", "o.jsonl", **options, **flags)["exit_code"] == 0
        return [row["error"] for row in read_output("o.jsonl")]

    rows = [{"prompt": "The covid:"}, {"prompt": "The fox:"}]
    write_jsonl("in.jsonl", rows)
    assert errors() == ["invalid_token_ids", None]
    write_jsonl("in.jsonl", rows[1:])
    assert score("in.jsonl", "o.jsonl", labels="covid,No", **options)["exit_code"] == 2
    write_jsonl("in.jsonl", [{"prompt": "It:", "choices": [each, "No"]} for each in ("covid", "a covid fox", "fox")])
    assert errors(choices_column="choices") == ["invalid_labels", "invalid_labels", None]
    write_jsonl("in.jsonl", [{"prompt": "It:", "target": each} for each in (" covid", " fox", "a covid")])
    assert errors(target_column="target") == ["invalid_target", None, "invalid_target"]
    write_jsonl("in.jsonl", [{"text": "The covid fox"}, {"text": "The fox"}])
    assert errors(target_column="text") == ["invalid_target", None]
