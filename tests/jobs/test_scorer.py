"""`prefillcli.ray.Scorer` without Ray: a table in, the same table with scores out, as the command scores a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.errors import UsageError
from prefillcli.ray import Scorer
from tests.jobs.jobs import HISTORIES, Reference, assert_scored, score, texts

ADDED = (
    *("score", "logprob_Yes", "logprob_No", "label_mass", "prediction", "prompt_tokens", "shared_tokens"),
    *("kept_tokens", "computed_tokens", "seconds", "method", "truncated", "error", "error_detail"),
)


def compared(table: pa.Table) -> list[dict[str, Any]]:
    """What scoring added to each row, but for the seconds, which differ from run to run."""
    return table.select([name for name in ADDED if name != "seconds"]).to_pylist()


def test_every_row_gets_the_answer_of_the_model_beside_its_own_columns(model: Path, reference: Reference) -> None:
    prompts = texts(40)
    table = pa.table({"id": range(40), "prompt": prompts, "tags": [[i] for i in range(40)]})
    scored = Scorer(model=model)(table)
    assert scored.select(["id", "prompt", "tags"]).equals(table)
    assert scored.column_names == ["id", "prompt", "tags", *ADDED]
    assert_scored(scored.to_pylist(), [reference.answer(prompt) for prompt in prompts])


def test_compression_is_that_of_the_command(model: Path, draft: Path) -> None:
    table = pa.table({"prompt": [text * 20 for text in texts(9)], "keep": [None, 0.5, 1.0] * 3})
    options = {"draft": draft, "keep": 0.3, "compress_above": 0, "keep_last": 8}
    pq.write_table(table, "in.parquet")
    assert score("in.parquet", model=model, **options)["exit_code"] == 0
    scored = Scorer(model=model, **options)(table)
    assert compared(scored) == compared(pq.read_table("out.parquet"))
    assert set(scored["method"].to_pylist()) == {"specprefill", "full"}


def test_tables_in_pieces_slices_and_without_rows(model: Path) -> None:
    scorer = Scorer(model=model)
    whole = pa.table({"prompt": texts(12)})
    wanted = compared(scorer(whole))
    pieces = pa.concat_tables([whole.slice(0, 5), whole.slice(5, 0), whole.slice(5)])
    assert compared(scorer(pieces)) == wanted
    none = scorer(whole.slice(0, 0))
    assert none.num_rows == 0
    assert none.schema.equals(scorer(whole).schema)


def test_a_prefix_is_computed_once_for_the_rows_of_a_table(model: Path) -> None:
    rows = [f"{HISTORIES[0] * 20} number {i}\nAnswer:" for i in range(8)]
    together = Scorer(model=model)(pa.table({"prompt": rows}))
    tokens, shared = together["prompt_tokens"].to_pylist(), together["shared_tokens"].to_pylist()
    assert min(shared) > 0.9 * max(tokens)
    assert sum(together["computed_tokens"].to_pylist()) < 2 * max(tokens)


def test_token_ids_may_come_as_arrays_and_other_arrays_are_error_rows(model: Path, reference: Reference) -> None:
    ids = reference.ids(texts(1)[0])
    scorer = Scorer(model=model, prompt_column="prompt_token_ids")
    listed = scorer(pa.table({"prompt_token_ids": [ids, ids]}))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([ids, ids]))
    assert compared(scorer(pa.table({"prompt_token_ids": tensors}))) == compared(listed)
    floats = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([ids, ids], np.float64))
    assert scorer(pa.table({"prompt_token_ids": floats}))["error"].to_pylist() == ["invalid_token_ids"] * 2


def test_tables_that_do_not_fit_are_refused(model: Path) -> None:
    scorer = Scorer(model=model)
    with pytest.raises(UsageError, match="has a column 'score' already"):
        scorer(pa.table({"prompt": ["x"], "score": [1.0]}))
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(UsageError, match="two columns of the table are named 'prompt'\nrename or drop"):
        scorer(twice)
    with pytest.raises(UsageError, match="no column 'prompt' in the table\navailable: text"):
        scorer(pa.table({"text": ["x"]}))
    with pytest.raises(UsageError, match="column 'image': its values have no type in common"):
        scorer({"prompt": np.array(["x"]), "image": np.zeros((1, 2, 2))})
