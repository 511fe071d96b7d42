"""Every call of a shard and of a merge fails once, in every way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.file_faults import Kind
from tests.faults.loops import Job, fail_each
from tests.faults.nursery import Nursery
from tests.faults.output_checks import OutputChecks
from tests.unit.rows.test_joined_shards import merge, score_both


def score_shards(name: str, folder: Path, **options: Any) -> None:
    score_both(f"{folder}/{name}", **options)


def merge_shards(name: str, folder: Path) -> None:
    assert merge(f"{folder}/{name}") == 15


def finish_shards(name: str, folder: Path) -> None:
    score_shards(name, folder, resume=True)
    merge_shards(name, folder)


def shards_job(nursery: Nursery, kind: Kind, name: str) -> Job:
    checks = OutputChecks(nursery, kind, name, partial(finish_shards, name), makes_output=False)
    return Job(partial(score_shards, name), checks.goes_on, None, checks.kept_out)


def merge_job(nursery: Nursery, place: Path, kind: Kind, name: str) -> Job:
    begin = place / "begin"
    begin.mkdir()
    score_shards(name, begin)
    checks = OutputChecks(nursery, kind, name, partial(merge_shards, name), begin=begin)
    return Job(partial(merge_shards, name), checks.goes_on, begin, checks.kept_out)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", Kind)
def test_every_call_of_a_shard_may_fail(
    nursery: Nursery, tmp_path: Path, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = shards_job(nursery, kind, "o.parquet")
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["o.parquet", "o.jsonl", "o/"])
@pytest.mark.parametrize("kind", Kind)
def test_every_call_of_a_merge_may_fail(
    nursery: Nursery, tmp_path: Path, name: str, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = merge_job(nursery, tmp_path, kind, name)
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Kind.KILL, Kind.LATE])
def test_some_calls_of_a_merge_may_fail(
    nursery: Nursery, tmp_path: Path, kind: Kind, count_faults: Callable[[str, int], None]
) -> None:
    job = merge_job(nursery, tmp_path, kind, "o/")
    count_faults(kind.meaning, fail_each(nursery, tmp_path, job, kind, first=10, every=19))
