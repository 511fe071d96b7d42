"""Scoring as a stage of Ray Data, in real actors: `make test-ray`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefillcli.ray import Scorer
from prefillcli.scoring.runners.worker import memory_share
from tests.jobs.jobs import Reference, score, texts, write_parquet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here; make test-ray brings its own"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

ROWS = 600


@pytest.fixture(scope="module", autouse=True)
def data() -> Iterator[Any]:
    """Ray Data on a cluster that counts four cores: two for actors, and some for the stages before them."""
    import ray
    import ray.data

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray.data
    ray.shutdown()


def stage(dataset: Any, model: Path, batch_size: int = 100, fn: type = Scorer, **options: Any) -> Any:
    return dataset.map_batches(
        fn,
        fn_constructor_kwargs={"model": str(model), **options},
        batch_format="pyarrow",
        batch_size=batch_size,
        concurrency=2,
    )


def test_a_pipeline_gives_the_rows_of_the_command(data: Any, model: Path) -> None:
    prompts: list[str | None] = texts(ROWS)
    prompts[7], prompts[ROWS - 1] = None, "word " * 3000
    write_parquet("in.parquet", id=list(range(ROWS)), prompt=prompts, day=["monday"] * ROWS)
    assert score("in.parquet", model=model, dtype="float32")["exit_code"] == 3
    dataset = data.read_parquet(str(Path("in.parquet").absolute())).filter(lambda row: True).repartition(8)
    stage(dataset, model, dtype="float32").write_parquet(str(Path("scored").absolute()))
    found = pa.concat_tables(pq.read_table(path) for path in sorted(Path("scored").glob("*.parquet"))).sort_by("id")
    wanted = pq.read_table("out.parquet")
    assert found.column_names == ["id", "prompt", "day", *wanted.column_names[1:]]
    assert found["id"].to_pylist() == list(range(ROWS))
    assert found["error"].to_pylist() == wanted["error"].to_pylist()
    for name in ("prediction", "prompt_tokens", "truncated", "method"):
        assert found[name].to_pylist() == wanted[name].to_pylist(), name
    for name, most in (("score", 1e-6), ("label_mass", 1e-6), ("logprob_Yes", 1e-5), ("logprob_No", 1e-5)):
        for got, want in zip(found[name].to_pylist(), wanted[name].to_pylist(), strict=True):
            assert got == want if want is None else abs(got - want) <= most, name


def test_columns_that_earlier_stages_make_can_be_prompts_and_actors_share_memory(
    data: Any, model: Path, reference: Reference
) -> None:
    class Sized(Scorer):
        def __call__(self, batch: pa.Table) -> pa.Table:
            return super().__call__(batch).append_column("share", [[memory_share("cpu")] * batch.num_rows])

    prompts = texts(20)
    ids = [reference.ids(prompt) for prompt in prompts]
    wanted = [reference.answer(prompt).score for prompt in prompts]
    arrays = data.from_items([{"row": at} for at in range(20)]).map_batches(
        lambda batch: {"row": batch["row"], "prompt_token_ids": [ids[at] for at in batch["row"]]}
    )
    rows = stage(arrays, model, fn=Sized).sort("row").take_all()
    assert [row["error"] for row in rows] == [None] * 20
    assert max(abs(row["score"] - score) for row, score in zip(rows, wanted, strict=True)) < 1e-5
    assert {row["share"] for row in rows} == {1 / 4}  # one of four cores


def test_a_wrong_option_ends_the_pipeline_with_its_message(data: Any, model: Path) -> None:
    dataset = data.from_items([{"prompt": "x"}])
    with pytest.raises(Exception, match="no option 'lables'; did you mean 'labels'"):
        stage(dataset, model, lables="Yes,No").take_all()
