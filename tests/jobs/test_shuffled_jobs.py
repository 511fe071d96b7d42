"""With `--deterministic`, whole jobs drawn at random give each row the same bits."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.job_shuffles import output_of, random_job
from tests.jobs.jobs import read_output, score
from tests.jobs.models import save_model
from tests.jobs.test_deterministic import MODELS, bits_of, prompts, write_rows

pytestmark = pytest.mark.nightly

JOBS = int(os.environ.get("JOB_SHUFFLES", "50"))
FEW = 3
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module", params=MODELS)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / request.param, family=request.param, **MODELS[request.param])


def assert_same_bits(folder: Path, model: Path, dtype: str, jobs: int, **more: Any) -> None:
    """So many random jobs give each row the bits that a job over all of them gives on one thread."""
    rows, flags = len(prompts()), {"model": model, "dtype": dtype, "id_column": "id", **more}
    write_rows(np.arange(rows))
    assert score("in.parquet", threads=1, **flags)["exit_code"] == 0
    wanted = bits_of(read_output("out.parquet"))
    assert len(set(wanted.values())) > rows / 2, "scores must differ enough to tell a wrong row"
    rng = np.random.default_rng(zlib.crc32(f"{model.name} {dtype}".encode()))
    for number in range(jobs):
        job = random_job(rng, rows)
        own = folder / f"{number}"
        own.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(own)
            found = bits_of(output_of(job, write_rows(np.array(job.order)), flags))
        assert len(found) == len(job.order)
        differ = [id for id, bits in found.items() if bits != wanted[id]]
        assert not differ, f"job {number}, {job}: rows {differ} have other bits"


@each_dtype
def test_random_jobs_give_each_row_the_same_bits(judge: Path, tmp_path: Path, dtype: str) -> None:
    assert_same_bits(tmp_path, judge, dtype, JOBS, deterministic=True)


@each_dtype
def test_without_it_bits_depend_on_the_job(model: Path, tmp_path: Path, dtype: str) -> None:
    """What the test above would see."""
    with pytest.raises(AssertionError, match="have other bits"):
        assert_same_bits(tmp_path, model, dtype, FEW)
