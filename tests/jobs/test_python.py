"""`prefillcli.score` and `prefillcli.Scorer`: what goes in and comes out, and what they leave behind in a notebook."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import prefillcli
from prefillcli.engines import loader
from prefillcli.engines.torch import TorchEngine
from prefillcli.library.table_scoring import Steps, TableScorer
from tests.jobs.jobs import Reference, assert_scored, beside_answers, score, texts, write_jsonl, write_parquet

PROMPTS = texts(6)


@pytest.fixture(scope="module")
def scorer(model: Path) -> Iterator[prefillcli.Scorer]:
    with prefillcli.Scorer(model) as loaded:
        yield loaded


def without_seconds(table: pa.Table) -> list[dict[str, Any]]:
    return table.drop_columns(["seconds"]).to_pylist()


# ------------------------------------------------------------------------------------------------- importing it


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, importlib; before = set(sys.modules); import prefillcli; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=_root(), check=True)
    assert set(done.stdout.split()) == {"prefillcli", "__future__"}


def test_the_names_that_are_exported() -> None:
    errors = {"PrefillError", "UsageError", "ResourceError", "ContentChangedError", "FailedRowsError"}
    questions = {"Predicate", "Choice", "Score"}
    assert set(prefillcli.__all__) == {"score", "Scorer", "__version__", *errors, *questions}
    assert set(prefillcli.__all__) <= set(dir(prefillcli))
    for name in prefillcli.__all__:
        assert getattr(prefillcli, name) is not None
    for name in errors:
        assert issubclass(getattr(prefillcli, name), prefillcli.PrefillError)
    with pytest.raises(AttributeError, match="no attribute 'scores'"):
        prefillcli.scores  # type: ignore[attr-defined]  # noqa: B018


def test_the_scorer_of_ray_is_the_same_class() -> None:
    from prefillcli.ray import Scorer

    assert Scorer is prefillcli.Scorer


def test_neither_torch_nor_ray_is_imported_before_a_model_is_loaded() -> None:
    code = "import sys, prefillcli, prefillcli.ray; prefillcli.Scorer, prefillcli.score; "
    code += "print({'ray', 'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=_root(), check=True)
    assert done.stdout.strip() == "set()"


def _root() -> Path:
    return Path(prefillcli.__file__).parents[1]


# ------------------------------------------------------------------------------------------- rows of every kind

KINDS: dict[str, Callable[[], Any]] = {
    "table": lambda: pa.table({"prompt": PROMPTS, "n": range(6)}),
    "record batch": lambda: pa.record_batch({"prompt": PROMPTS, "n": list(range(6))}),
    "reader": lambda: pa.table({"prompt": PROMPTS, "n": range(6)}).to_reader(max_chunksize=4),
    "pandas": lambda: pd.DataFrame({"prompt": PROMPTS, "n": range(6)}),
    "pandas categories": lambda: pd.DataFrame({"prompt": pd.Categorical(PROMPTS), "n": range(6)}),
    "polars": lambda: pl.DataFrame({"prompt": PROMPTS, "n": range(6)}),
    "polars categories": lambda: pl.DataFrame({"prompt": pl.Series(PROMPTS, dtype=pl.Categorical), "n": range(6)}),
    "dicts": lambda: [{"prompt": prompt, "n": n} for n, prompt in enumerate(PROMPTS)],
    "dicts, one at a time": lambda: ({"n": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS)),
    "columns": lambda: {"prompt": np.array(PROMPTS), "n": np.arange(6)},
}
TEXTS: dict[str, Callable[[], Any]] = {
    "list": lambda: PROMPTS,
    "generator": lambda: (prompt for prompt in PROMPTS),
    "array": lambda: np.array(PROMPTS),
    "pandas": lambda: pd.Series(PROMPTS, index=list("abcdef")),
    "polars": lambda: pl.Series(PROMPTS),
    "arrow": lambda: pa.chunked_array([PROMPTS[:2], PROMPTS[2:]]),
    "one arrow array": lambda: pa.array(PROMPTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_kind_keep_their_columns_and_get_the_models_answers(
    scorer: prefillcli.Scorer, reference: Reference, kind: str
) -> None:
    scored = scorer.score(KINDS[kind]())
    assert isinstance(scored, pa.Table)
    assert_scored(scored.to_pylist(), [reference.answer(prompt) for prompt in PROMPTS])
    assert scored["n"].to_pylist() == list(range(6))
    assert [str(prompt) for prompt in scored["prompt"].to_pylist()] == PROMPTS


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_prompts(scorer: prefillcli.Scorer, reference: Reference, kind: str) -> None:
    scored = scorer.score(TEXTS[kind]())
    assert_scored(scored.to_pylist(), [reference.answer(prompt) for prompt in PROMPTS])
    assert scored.column_names[:2] == ["prompt", "score"]


def test_scores_have_no_empty_chunk(scorer: prefillcli.Scorer) -> None:
    table = pa.table({"prompt": PROMPTS, "at": pa.array([2**62] * 6).view(pa.timestamp("us", "tzutc()"))})
    scored = scorer.score(table)
    assert [len(chunk) for chunk in scored["score"].chunks] == [6]
    assert scored["at"].equals(table["at"])
    assert scorer.score([]).num_rows == 0


@pytest.mark.parametrize("options", [{}, {"template": "{{ prompt }}: ", "labels": ("No", "Yes"), "temperature": 2}])
def test_scores_are_those_of_the_command(model: Path, options: dict[str, Any]) -> None:
    table = pa.table({"prompt": [*texts(12), None, "  ", "word " * 3000]})
    pq.write_table(table, "in.parquet")
    assert score("in.parquet", model=model, **options)["exit_code"] == 3
    wanted = pq.read_table("out.parquet").drop_columns(["row"])
    scored = prefillcli.score(table, model, **options)
    assert without_seconds(scored.drop_columns(["prompt"])) == without_seconds(wanted)


def test_a_data_frame_comes_back_with_its_index(scorer: prefillcli.Scorer) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS}, index=[f"row {n}" for n in range(6)]).iloc[[4, 1]]
    back = scorer.score(frame).to_pandas()
    assert list(back.index) == ["row 4", "row 1"]
    assert list(back["prompt"]) == [PROMPTS[4], PROMPTS[1]]
    assert back["score"].notna().all()


def test_dicts_may_have_different_keys_and_a_template_takes_them_and_texts(model: Path, reference: Reference) -> None:
    rows: list[dict[str, Any]] = [{"post": "fox"}, {"post": "dog", "n": 2}]
    scored = prefillcli.score(rows, model, template="{{ post }} {{ n or 0 }}: Answer:")
    assert_scored(scored.to_pylist(), [reference.answer("fox 0: Answer:"), reference.answer("dog 2: Answer:")])
    assert scored["n"].to_pylist() == [None, 2]
    scored = prefillcli.score(["fox"], model, template="no file: {{ prompt }}")
    assert_scored(scored.to_pylist(), [reference.answer("no file: fox")])


def test_chats_and_token_ids_come_by_their_usual_columns(chat_model: Path, chat_reference: Reference) -> None:
    ids = chat_reference.ids(PROMPTS[0])
    chat = [{"role": "user", "content": "fox"}]
    with prefillcli.Scorer(chat_model) as scorer:
        plain = scorer.score(["fox"])
        assert scorer.score([{"messages": chat}])["score"].to_pylist() == pytest.approx(plain["score"].to_pylist())
        assert_scored(scorer.score([{"prompt_token_ids": ids}]).to_pylist(), [chat_reference.answer(ids)])
        assert without_seconds(scorer.score(["fox"])) == without_seconds(plain)


@pytest.mark.parametrize("rows", [[], pa.table({"prompt": pa.array([], pa.string())}), pd.DataFrame()])
def test_no_rows_give_an_empty_table_with_all_columns(scorer: prefillcli.Scorer, rows: Any) -> None:
    empty = scorer.score(rows)
    assert empty.num_rows == 0
    assert empty.schema.field("score").type == pa.float64()
    assert empty.column_names[-2:] == ["error", "error_detail"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (7, "cannot read rows of the type int"),
        (b"text", "cannot read rows of the type bytes"),
        ([1, 2], "item 0 has the type int"),
        (["text", {"prompt": "x"}], "item 0 has the type str"),
        ([[1, 2], [3]], "item 0 has the type list"),
        ({"prompt": "one text"}, "column 'prompt' is one text; for one row give a list of one dict"),
        ({"prompt": ["a", "b"], "n": [1]}, "expected length 2 but got length 1"),
        ({1: ["a"], "1": ["b"]}, "two columns are called '1'"),
        ([{1: "a", "1": "b"}], "two columns are called '1'"),
        ([{}, {}], "no column 'prompt' in the table"),
        ([{"prompt": "a", "n": 1}, {"prompt": "b", "n": "two"}], "column 'n': its values have no type in common"),
        (pa.array([1, 2]), "it is a column of int64, not of texts"),
        (pl.Series([1, 2]), "cannot read rows of the type polars Series"),
    ],
)
def test_other_things_are_refused_with_what_can_be_given(scorer: prefillcli.Scorer, rows: Any, message: str) -> None:
    with pytest.raises(prefillcli.UsageError) as error:
        scorer.score(rows)
    assert message in str(error.value)


class Own(Exception):
    """An error of the caller's code."""


def breaking_off(error: BaseException) -> pa.RecordBatchReader:
    def batches() -> Any:
        yield pa.record_batch({"prompt": PROMPTS})
        raise error

    return pa.RecordBatchReader.from_batches(pa.schema([("prompt", pa.string())]), batches())


@pytest.mark.parametrize("error", [Own("x"), KeyboardInterrupt(), ValueError("x"), TypeError("x"), SystemExit(3)])
def test_what_the_callers_code_raises_goes_through_unchanged(scorer: prefillcli.Scorer, error: BaseException) -> None:
    def rows() -> Any:
        yield {"prompt": "a"}
        raise error

    class Row(dict[str, str]):
        def get(self, *_: Any) -> Any:
            raise error

    class Columns(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise error

        def __iter__(self) -> Any:
            return iter(["prompt"])

        def __len__(self) -> int:
            return 1

    for given in (breaking_off(error), rows(), [Row(prompt="a")], Columns(), {"prompt": rows()}):
        with pytest.raises(type(error)) as raised:
            scorer.score(given)
        assert raised.value is error


def test_a_stream_of_another_library_that_breaks_off_says_why(scorer: prefillcli.Scorer) -> None:
    class Stream:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return breaking_off(Own("the disk is gone")).__arrow_c_stream__(requested_schema)

    with pytest.raises(prefillcli.PrefillError, match=r"Stream broke off: .*the disk is gone$"):
        scorer.score(Stream())


@pytest.mark.parametrize(
    "rows",
    [
        lambda bad: ["fox", bad, "dog"],
        lambda bad: [{"prompt": "fox"}, {"prompt": bad}, {"prompt": "dog"}],
        lambda bad: {"prompt": ["fox", bad, "dog"]},
        lambda bad: {"prompt": iter(["fox", bad, "dog"])},
        lambda bad: [{"prompt": "fox"}, {"prompt": "x", "kept": {"a": [bad]}}, {"prompt": "dog"}],
    ],
)
def test_half_a_surrogate_pair_is_an_error_row_as_in_files(
    scorer: prefillcli.Scorer, reference: Reference, rows: Any
) -> None:
    scored = scorer.score(rows("half \ud83d of a pair"))
    assert scored["error"].to_pylist() == [None, "invalid_utf8", None]
    assert "half a surrogate pair" in scored["error_detail"][1].as_py()
    for row, prompt in ((0, "fox"), (2, "dog")):
        assert_scored(scored.slice(row, 1).to_pylist(), [reference.answer(prompt)])
        assert scored["prompt"][row].as_py() == prompt
    assert scored["prompt"][1].as_py() in ("x", "half \ufffd\ufffd\ufffd of a pair")
    if "kept" in scored.column_names:
        assert scored["kept"].to_pylist() == [None, None, None]


@pytest.mark.parametrize("options", [{"prompt_column": "\ud800"}, {"labels": "\ud800,No"}, {"prompt_column": 3}])
def test_options_that_are_no_text_are_refused_before_rows_are_read(model: Path, options: Any) -> None:
    with pytest.raises(prefillcli.UsageError, match=r"--(prompt-column|labels)"):
        prefillcli.score(["fox"], model, **options)


def test_a_path_with_a_nul_is_no_template(model: Path) -> None:
    with pytest.raises(prefillcli.UsageError, match="it holds a null character"):
        prefillcli.score(["fox"], model, template="a\0b")


def test_a_row_without_columns_is_a_row(model: Path) -> None:
    scored = prefillcli.score([{}, {}], model, template="{{ 'fox' }}")
    assert scored["error"].to_pylist() == [None, None]


# ---------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("parquet", {}),
        ("parquet", {"sample": 5, "seed": 3}),
        ("jsonl", {"id_column": "id", "keep_columns": ["n", "tags"]}),
    ],
)
def test_a_path_gives_what_the_command_would_write(
    scorer: prefillcli.Scorer, model: Path, options: dict[str, Any], kind: str
) -> None:
    rows = [{"id": f"row {n}", "prompt": prompt, "n": n, "tags": [n]} for n, prompt in enumerate([*PROMPTS, None])]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    else:
        write_jsonl("in.jsonl", [*rows, b"no json"])
    assert score(f"in.{kind}", model=model, max_error_rate=1.0, **options)["exit_code"] == 0
    before = sorted(Path().rglob("*"))
    scored = scorer.score(f"in.{kind}", **options)
    wanted = pq.read_table("out.parquet")
    assert scored.schema.equals(wanted.schema)
    assert without_seconds(scored) == without_seconds(wanted)
    assert scored.schema.metadata is None
    assert sorted(Path().rglob("*")) == before


def test_probabilities_are_those_of_the_command(model: Path) -> None:
    write_parquet("in.parquet", post=["fox", "dog", "Yes"])
    options: dict[str, Any] = {"template": "{{ post }} Answer:", "calibrate_with": ["N/A", ""]}
    assert score("in.parquet", model=model, **options)["exit_code"] == 0
    with prefillcli.Scorer(model, **options) as calibrated:
        for rows in ("in.parquet", pq.read_table("in.parquet")):
            found = calibrated.score(rows)["probability"].to_pylist()
            assert found == pytest.approx(pq.read_table("out.parquet")["probability"].to_pylist(), abs=1e-6)
        assert calibrated.score([])["probability"].type == pa.float64()


def test_globs_folders_urls_and_lists_of_paths(scorer: prefillcli.Scorer, reference: Reference) -> None:
    Path("days").mkdir()
    for day in (1, 2):
        write_parquet(f"days/{day}.parquet", prompt=PROMPTS[3 * day - 3 : 3 * day])
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    files = [Path("days/1.parquet"), Path("days/2.parquet")]
    for path in ("days", "days/*.parquet", Path("days"), files, Path("days").absolute().as_uri()):
        assert_scored(scorer.score(path).to_pylist(), wanted)  # type: ignore[arg-type]


def test_damaged_lines_are_error_rows_and_damaged_files_raise(scorer: prefillcli.Scorer) -> None:
    write_jsonl("in.jsonl", [{"prompt": PROMPTS[0]}, b"{"])
    assert scorer.score("in.jsonl")["error"].to_pylist() == [None, "invalid_json"]
    Path("in.parquet").write_bytes(b"PAR1 no PAR1")
    with pytest.raises(prefillcli.PrefillError, match=r"in\.parquet"):
        scorer.score("in.parquet")


def test_missing_files_are_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefillcli.Scorer, "__init__", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(prefillcli.UsageError, match=r"none\.parquet"):
        prefillcli.score("none.parquet", "some model")
    with pytest.raises(prefillcli.UsageError, match="limit is for paths"):
        prefillcli.score(PROMPTS, "some model", limit=3)


def test_a_prompt_in_place_of_a_path_is_told_apart(scorer: prefillcli.Scorer) -> None:
    for prompt in ("Is the sky blue? Answer:", "Is the sky\nblue?" * 300):
        with pytest.raises(prefillcli.UsageError, match=r"a text is a path: for one prompt give a list"):
            scorer.score(prompt)


# --------------------------------------------------------------------------------------------------------- errors


def test_error_rows_are_rows_or_an_exception_that_has_them(scorer: prefillcli.Scorer) -> None:
    rows = [PROMPTS[0], "\ud83d", "fox " * 200_000, PROMPTS[1]]
    codes = ["invalid_utf8", scorer.score(rows)["error"][2].as_py()]
    assert scorer.score(rows)["error"].to_pylist() == [None, *codes, None]
    with pytest.raises(prefillcli.FailedRowsError) as failed:
        scorer.score(rows, on_error="raise")
    text = f"2 of 4 rows have no score (invalid_utf8 1, {codes[1]} 1); row 1: invalid_utf8"
    assert str(failed.value).startswith(text)
    assert without_seconds(failed.value.table) == without_seconds(scorer.score(rows))
    assert scorer.score(PROMPTS, on_error="raise").num_rows == 6
    empty = scorer.score([PROMPTS[0], None, "  "], on_error="raise")
    assert empty["error"].to_pylist() == [None, "skipped_empty", "skipped_empty"]
    with pytest.raises(prefillcli.UsageError, match="on_error='stop': use 'row' or 'raise'"):
        scorer.score(PROMPTS, on_error="stop")  # type: ignore[arg-type]


def test_rows_that_are_to_be_skipped_are_no_failure(model: Path) -> None:
    table = prefillcli.score(["fox " * 50, "fox"], model, max_length=9, on_long="skip", on_error="raise")
    assert table["error"].to_pylist() == ["skipped_too_long", None]


def test_messages_name_options_as_the_command_does(model: Path, scorer: prefillcli.Scorer) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"lookahead": 4}, "--set lookahead needs a draft model"),
        ({"dtype": "int8"}, "--dtype 'int8': should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"labels": "Yes"}, "--labels 'Yes': at least two labels"),
    ]
    for options, message in refused:
        with pytest.raises(prefillcli.UsageError) as error:
            prefillcli.Scorer(model, **options)
        assert message in str(error.value)
    with pytest.raises(prefillcli.UsageError, match=r"no column 'prompt' in the table\navailable: text"):
        scorer.score([{"text": "fox"}])


# -------------------------------------------------------------------------------------- again, elsewhere, and gone


def test_a_scorer_is_asked_again_and_again(scorer: prefillcli.Scorer) -> None:
    first = without_seconds(scorer.score(PROMPTS))
    with pytest.raises(prefillcli.UsageError):
        scorer.score([{"other": 1}])
    assert without_seconds(scorer.score(PROMPTS)) == first


def test_threads_may_share_a_scorer_and_have_their_own(scorer: prefillcli.Scorer, draft: Path, model: Path) -> None:
    with prefillcli.Scorer(draft) as other, ThreadPoolExecutor(4) as pool:
        wanted = [without_seconds(each.score(PROMPTS)) for each in (scorer, other)]
        assert wanted[0] != wanted[1]
        asked = [pool.submit((scorer, other)[n % 2].score, PROMPTS) for n in range(12)]
        for n, answer in enumerate(asked):
            assert without_seconds(answer.result()) == wanted[n % 2]


def test_closing_frees_the_weights_and_ends_the_thread(model: Path, draft: Path) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    scorer = prefillcli.Scorer(model, draft=draft, keep=0.5, template="{{ prompt }} Answer:")
    assert scorer._tables is not None
    scorer.score(PROMPTS)
    held = [weakref.ref(each) for each in scorer._tables._models.pool.engine.walk.model.parameters()]
    assert held
    gc.disable()  # what is left in cycles does not go by itself
    try:
        scorer.close()
        assert [ref for ref in held if ref() is not None] == []
    finally:
        gc.enable()
    assert {thread.ident for thread in threading.enumerate()} <= before
    scorer.close()
    assert repr(scorer) == "<prefillcli.Scorer (closed)>"
    with pytest.raises(prefillcli.UsageError, match="this Scorer is closed: make another one"):
        scorer.score(PROMPTS)


def test_a_scorer_that_is_forgotten_goes_too(model: Path) -> None:
    scorer = prefillcli.Scorer(model)
    assert scorer._tables is not None
    held = weakref.ref(scorer._tables._models.pool.engine.walk.model)
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("prefill-scorer")][-1:]
    del scorer
    gc.collect()
    thread.join(30)
    assert held() is None
    assert not thread.is_alive()


def test_it_shows_where_its_model_is(scorer: prefillcli.Scorer, model: Path) -> None:
    assert repr(scorer) == f"<prefillcli.Scorer {model} on cpu in float32>"


def test_nothing_is_said_or_left_behind(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def surroundings() -> tuple[Any, ...]:
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        threads = (torch.get_num_threads(), pa.cpu_count(), torch.get_default_dtype(), torch.is_grad_enabled())
        return dict(os.environ), handlers, threads, sys.stdout, sys.stderr, os.getcwd()

    torch.set_num_threads(2)
    pa.set_cpu_count(3)
    before = surroundings()
    with prefillcli.Scorer(model, threads=1) as scorer:
        assert surroundings() == before
        scorer.score(PROMPTS)
        assert surroundings() == before
    assert surroundings() == before
    out, err = capfd.readouterr()
    assert (out, beside_answers(err)) == ("", [])
    torch.set_num_threads(1)


def test_the_threads_asked_for_compute_whatever_was_set_since(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    answer = TorchEngine.answer

    def watched(self: TorchEngine, *arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return answer(self, *arguments)

    monkeypatch.setattr(TorchEngine, "answer", watched)
    with prefillcli.Scorer(model, threads=2) as scorer:
        torch.set_num_threads(1)
        scorer.score(PROMPTS)
    assert seen == [2]
    assert torch.get_num_threads() == 1


def test_the_callers_settings_of_torch_do_not_reach_the_model(scorer: prefillcli.Scorer) -> None:
    wanted = without_seconds(scorer.score(PROMPTS))
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert without_seconds(scorer.score(PROMPTS)) == wanted


def test_progress_is_shown_when_it_is_asked_for(
    scorer: prefillcli.Scorer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.library.table_scoring.SECONDS_BETWEEN_LINES", 1e-9)
    scorer.score([*PROMPTS, None], progress=True)
    out, lines = capfd.readouterr()
    assert out == ""
    assert "7 of 7 rows (100.0%)" in lines.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # as in a notebook
    write_parquet("in.parquet", prompt=PROMPTS)
    scorer.score("in.parquet", progress=True)
    assert "| 6 of 6 rows [" in capfd.readouterr().err.rpartition("\r")[2]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell lets what it starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_call_ends_and_the_scorer_goes_on(
    scorer: prefillcli.Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{'long history ' * 60} {prompt}" for prompt in PROMPTS]
    wanted = without_seconds(scorer.score(rows))
    step, steps = Steps.step, []

    def interrupted(self: Steps, *arguments: Any) -> None:
        steps.append(arguments)
        if len(steps) == 4:  # in the middle of a pack
            os.kill(os.getpid(), signal.SIGINT)
            assert self._asked.wait(30)
        step(self, *arguments)

    monkeypatch.setattr(Steps, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scorer.score(rows)
    assert len(steps) == 4
    monkeypatch.setattr(Steps, "step", step)
    assert without_seconds(scorer.score(rows)) == wanted


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_load_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    close, opened = TableScorer.close, loader.open_folders
    waiting, closed = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        assert waiting.wait(30)
        return opened(*arguments, **options)

    def noted(self: TableScorer) -> None:
        held.append(weakref.ref(self))
        close(self)
        closed.set()

    monkeypatch.setattr(loader, "open_folders", slow)
    monkeypatch.setattr(TableScorer, "close", noted)
    with pytest.raises(KeyboardInterrupt):
        prefillcli.Scorer(model)
    waiting.set()
    assert closed.wait(60)


def test_an_actor_plans_with_its_share_of_the_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def longest(share: float) -> int:
        monkeypatch.setattr("prefillcli.scoring.runners.worker.memory_share", lambda device: share)
        with prefillcli.Scorer(model) as scorer:
            assert scorer._tables is not None
            return scorer._tables._models.pool.engine.limits.max_tokens

    assert longest(0.25) < 0.5 * longest(1.0)


def test_a_module_that_is_only_called_ray_is_no_cluster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert prefillcli.score(PROMPTS, model).num_rows == 6


def test_a_forked_process_is_told_to_make_its_own(scorer: prefillcli.Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a real fork beside torch's threads may hang
    with pytest.raises(prefillcli.UsageError, match="make one in each process"):
        scorer.score(PROMPTS)


def test_the_warning_of_the_sample_model_is_the_only_message(capfd: pytest.CaptureFixture[str]) -> None:
    assert prefillcli.score(["Is the sky blue? Answer:"]).num_rows == 1
    (_, advice) = capfd.readouterr().err.splitlines()
    assert "--model" in advice


def test_windows_of_a_table_are_those_of_a_file(
    model: Path, scorer: prefillcli.Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.core import windows

    seen: list[int] = []
    build = windows._window
    monkeypatch.setattr(windows, "_window", lambda index, *rest: seen.append(index) or build(index, *rest))
    table = pa.table({"prompt": ["no"] * 16_384 + ["yes"] * 20})
    assert scorer.score(pa.concat_tables([table.slice(0, 700), table.slice(700)])).num_rows == 16_404
    assert seen == [0, 1]


# ---------------------------------------------------------------------------------------------- one Scorer, any form


def test_one_scorer_takes_texts_in_every_form_in_turn(model: Path) -> None:
    prompts = ["I want my money back", "Thank you!"]
    forms = [
        prompts,
        pd.DataFrame({"text": prompts}),
        [{"document": each, "n": 1} for each in prompts],
        pl.DataFrame({"prompt": prompts}),
        pa.table({"text": prompts}),
        prompts,
    ]
    with prefillcli.Scorer(model, ask="Is it a refund?", options=["yes", "no"]) as scorer:
        tables = [scorer(form) for form in forms]
    assert all(table["error"].null_count == 2 for table in tables)
    answers = [[list(each.values()) for each in table["answer.probabilities"].to_pylist()] for table in tables]
    np.testing.assert_allclose(answers, [answers[0]] * len(forms), atol=1e-6)
    assert answers[0][0] != answers[0][1]


def test_one_scorer_takes_chats_and_texts_in_turn(chat_model: Path) -> None:
    said = [{"role": "user", "content": "Is it late?"}]
    with prefillcli.Scorer(chat_model) as scorer:
        scores = [
            scorer(form)["score"][0].as_py() for form in (["Is it late?"], [{"messages": said}], ["Is it late?"])
        ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[0] == pytest.approx(scores[2], abs=1e-6)


@pytest.mark.parametrize("orient", ["records", "list"])
def test_what_is_missing_in_records_of_a_frame_is_null_as_in_the_frame(scorer: prefillcli.Scorer, orient: Any) -> None:
    day = pd.Timestamp("2026-01-31")
    frame = pd.DataFrame(
        {
            "prompt": [PROMPTS[0], float("nan"), pd.NA, None, PROMPTS[1]],
            "number": [0.5, float("nan"), 2, 3, 4],
            "day": [pd.NaT, day, pd.NaT, day, day],
            "count": pd.array([1, None, 3, 4, 5], dtype="Int64"),
            "note": ["a", pd.NA, float("nan"), pd.NaT, None],
        }
    )
    wanted, found = scorer(frame), scorer(frame.to_dict(orient))
    assert wanted["prompt"].null_count == 3
    for name in (*frame.columns, "error", "score"):
        assert found[name].null_count == wanted[name].null_count > 0
        assert found[name].to_pylist() == wanted[name].to_pylist()
    assert scorer(frame["prompt"].tolist())["error"].to_pylist() == wanted["error"].to_pylist()
