"""Jobs over the same rows in random orders, windows, packs and chunks, with random threads and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.options.commands import MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.merge import merge_job
from tests.jobs.jobs import read_output, score
from tests.jobs.processes import SMALL, Command, Hold, words_of

_ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
_LEAST_KILLED = 2 * SMALL.window_rows  # a window has a pack at least, and a run is killed in the second or later


@dataclass(frozen=True, slots=True)
class JobShuffle:
    """What must not change a score: which rows there are, in which order, and how they are computed."""

    way: str
    order: tuple[int, ...]
    window_rows: int
    runs: tuple[Mapping[str, Any], ...]
    """The options of each run: one of a `whole` job, two of one that is `killed` and goes on, or of two `shards`."""
    kill_at: int
    """The pack in which a run is killed."""


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """How a run computes; sizes are even on a scale of logarithms."""

    def size(least: int, most: int) -> int:
        return int(np.exp(rng.uniform(np.log(least), np.log(most))))

    return {
        "pack_tokens": size(60, 4000),
        "chunk_tokens": size(8, 2048),
        "prefix_kv": str(rng.choice(["auto", "discard", "keep", "offload"])),
        "memory": str(rng.choice(["100MiB", "200MiB", "1GiB"])),
        "weights": "stream" if rng.random() < 1 / 8 else "resident",
        "threads": int(rng.integers(1, 4)),
        "workers": int(rng.integers(1, 3)),
    }


def random_job(rng: np.random.Generator, rows: int) -> JobShuffle:
    """One time in three a part of the rows is left out; one in four a job is killed and goes on, or is two shards."""
    way = str(rng.choice(["whole", "killed", "shards"], p=[0.75, 0.15, 0.1]))
    left = rows if rng.random() < 2 / 3 else int(rng.integers(_LEAST_KILLED if way == "killed" else 5, rows + 1))
    window_rows = int(rng.choice([SMALL.window_rows, 35, 1000]))
    runs = tuple(random_options(rng) for _ in range(1 if way == "whole" else 2))
    if way == "killed":
        window_rows = SMALL.window_rows  # as `Command` cuts them
        runs[0]["workers"] = 1  # the process that is killed computes
    order = tuple(int(each) for each in rng.permutation(rows)[:left])
    kill_at = int(rng.integers(2, max(_LEAST_KILLED, left) // SMALL.window_rows + 1))
    return JobShuffle(way, order, window_rows, runs, kill_at)


def output_of(job: JobShuffle, source: str, flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the job writes into this folder of a file with its rows in its order; `flags` change scores."""
    if job.way == "killed":
        _begin_and_kill(job, source, flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.jobs.jobs.granularity", replace(SMALL, window_rows=job.window_rows))
        if job.way == "shards":
            for number, options in enumerate(job.runs, 1):
                shard = f"{number}/{len(job.runs)}"
                assert score(source, shard=shard, **flags, **options)["exit_code"] == 0
            given = {"output": "out.parquet", "quiet": True}
            assert merge_job(load_settings(MergeSettings, given, environment={}))["exit_code"] == 0
        else:
            assert score(source, resume=job.way == "killed", **flags, **job.runs[-1])["exit_code"] == 0
    return read_output("out.parquet")


def _begin_and_kill(job: JobShuffle, source: str, flags: Mapping[str, Any]) -> None:
    words = words_of({**flags, **job.runs[0]})
    command = Command("score", source, "-o", "out.parquet", *words, hold=Hold(_ANSWER, job.kill_at))
    command.wait_until_held()
    command.kill()
    assert Path("out.parquet.prefill").is_dir()
    assert not Path("out.parquet").exists()
