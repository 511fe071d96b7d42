"""The parts of `--runner ray` that need no Ray: what an actor does when asked, and what it asks of a cluster."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefillcli.errors import ContentChangedError, UsageError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.compress.load import EstimateTask
from prefillcli.rows.proof import hash_model
from prefillcli.runtime.log import stdout_to_stderr
from prefillcli.scoring.runners.pool import BesideTask, ReportTask, WorkerError, WorkerSpec
from prefillcli.scoring.runners.ray import RayCluster, even_part, why_lost
from prefillcli.scoring.runners.worker import WorkerActor, memory_share
from tests.jobs.jobs import score, write_parquet


def settings(model: Path, **flags: Any) -> ScoreSettings:
    return load_settings(
        ScoreSettings, {"inputs": ["x"], "model": str(model), "runner": "ray", **flags}, environment={}
    )


@contextmanager
def actor() -> Iterator[WorkerActor]:
    """An actor in this process, whose stdout comes back at the end."""
    with stdout_to_stderr():
        yield WorkerActor()


def opened(actor: WorkerActor, spec: WorkerSpec) -> tuple[str, Any]:
    return pickle.loads(actor.open(pickle.dumps(spec)))  # noqa: S301


def done(actor: WorkerActor, task: Any) -> tuple[str, Any]:
    return pickle.loads(actor.run(pickle.dumps(task)))  # noqa: S301


def test_an_actor_loads_the_model_that_the_driver_has(model: Path) -> None:
    with actor() as worker:
        kind, ready = opened(worker, WorkerSpec(3, settings(model), digests={str(model): hash_model(model)}))
        assert (kind, ready.whole_packs) == ("started", True)
        kind, report = done(worker, ReportTask())
        assert (kind, report.worker.number, report.worker.packs) == ("done", 3, 0)


def test_another_model_at_the_same_path_is_refused(model: Path, tmp_path: Path) -> None:
    with actor() as worker:
        kind, error = opened(worker, WorkerSpec(1, settings(model), digests={str(model): "0" * 64}))
        assert (kind, type(error)) == ("failed", ContentChangedError)
        assert "other contents on the machine of worker 1" in str(error)
        gone = tmp_path / "gone"
        kind, error = opened(worker, WorkerSpec(1, settings(model), digests={str(gone): "0" * 64}))
        assert (kind, type(error)) == ("failed", ContentChangedError)
        assert f"{gone}: not found on the machine of worker 1" in str(error)


def test_what_goes_wrong_in_an_actor_comes_back_as_an_error(model: Path) -> None:
    with actor() as worker:
        kind, error = done(worker, ReportTask())
        assert (kind, type(error)) == ("failed", WorkerError)
        assert opened(worker, WorkerSpec(0, settings(model)))[0] == "started"
        kind, error = done(worker, BesideTask("draft", EstimateTask([])))
        assert (kind, str(error).partition(":")[0]) == ("failed", "KeyError")  # nothing was loaded for it
        assert "in the worker:\nTraceback" in error.__notes__[0]


def test_an_actor_tells_how_far_its_task_is_when_it_is_asked() -> None:
    with actor() as worker:
        told: list[tuple[int, float]] = []
        asking = threading.Thread(target=lambda: told.append(worker.advanced()))
        asking.start()
        worker._tell(5.0)
        asking.join()
        assert told == [(0, 5.0)]
        done(worker, ReportTask())  # the first task
        worker._tell(2.0)
        worker._tell(1.0)
        assert worker.advanced() == (1, 3.0)


def cluster_of(*nodes: dict[str, float], **given: Any) -> RayCluster:
    """A cluster that has been joined, of machines with these resources."""
    arguments: dict[str, Any] = {"resources": {}, "workers": 2, "device": "auto", "quiet": False, **given}
    cluster = RayCluster("head:6379", **arguments)
    total = {name: sum(node.get(name, 0.0) for node in nodes) for node in nodes for name in node}
    cluster.ray = SimpleNamespace(
        nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes], cluster_resources=lambda: total
    )
    return cluster


@pytest.mark.parametrize(
    ("nodes", "workers", "gpus", "cpus"),
    [
        ([8.0], 2, 0, 4),
        ([8.0], 3, 0, 2),
        ([8.0, 4.0], 2, 0, 4),  # 8 would leave one without a machine
        ([8.0, 8.0], 2, 0, 8),
        ([2.0], 4, 0, 1),  # no room for all of them: the rest waits
        ([], 1, 0, 1),
        ([16.0, 16.0], 2, 1, 8),  # both on the machine with GPUs
    ],
)
def test_workers_get_even_parts_of_the_cpus(nodes: list[float], workers: int, gpus: int, cpus: int) -> None:
    resources = [{"CPU": cores, "GPU": 2.0 * (at == 0)} for at, cores in enumerate(nodes)]
    assert even_part(resources, workers, gpus) == cpus


def test_a_worker_takes_a_gpu_where_there_are_any_and_what_was_asked_for() -> None:
    gpu = {"CPU": 8.0, "GPU": 2.0}
    assert cluster_of({"CPU": 8.0}).options() == {"num_cpus": 4.0, "num_gpus": 0.0}
    assert cluster_of(gpu).options() == {"num_cpus": 4.0, "num_gpus": 1.0}
    assert cluster_of(gpu, device="cpu").options() == {"num_cpus": 4.0}
    assert cluster_of({"CPU": 8.0}, device="cuda").options()["num_gpus"] == 1.0
    asked = {"num_cpus": 3.0, "num_gpus": 0.5, "memory": 8e9, "special": 1.0}
    wanted = {"num_cpus": 3.0, "num_gpus": 0.5, "memory": 8_000_000_000, "resources": {"special": 1.0}}
    assert cluster_of(gpu, resources=asked).options() == wanted


def test_resources_are_amounts_by_name(model: Path) -> None:
    given = settings(model, worker_resources=["num_cpus=4", "memory=8GiB", "special=1"]).processes.worker_resources
    assert given == {"num_cpus": 4.0, "memory": float(8 << 30), "special": 1.0}
    for wrong, why in (("CPU=4", "CPU is not a resource: use num_cpus"), ("special=x", "special must be a number")):
        with pytest.raises(UsageError, match=why):
            settings(model, worker_resources=[wrong])
    with pytest.raises(UsageError, match="num_cpus must be 0 or more"):
        settings(model, worker_resources={"num_cpus": -1})


def test_a_ray_client_and_one_device_for_all_are_refused(model: Path) -> None:
    write_parquet("in.parquet", prompt=["The fox. Answer:"])
    done = score("in.parquet", model=model, runner="ray", ray_address="ray://head:10001")
    assert done["exit_code"] == 2
    assert "prefill is not a Ray client" in done["error"]


def test_without_ray_the_runner_says_how_to_get_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_parquet("in.parquet", prompt=["The fox. Answer:"])
    done = score("in.parquet", model=model, runner="ray", overwrite=True)
    assert done["exit_code"] == 2
    assert "[ray]'" in done["error"]


def test_the_address_comes_from_the_option_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(given: str | None) -> str:
        return RayCluster(given, {}, workers=1, device="cpu", quiet=True).address

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert address(None) == "local"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert address(None) == "head:6379"
    assert address("other:6379") == "other:6379"


_DIED = "The actor is dead because its worker process has died. Worker exit type: "


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            f"{_DIED}NODE_OUT_OF_MEMORY Worker exit detail: Task was killed due to the node running low on memory.",
            "was ended by Ray, for its machine had too little memory left",
        ),
        (
            "The actor died because its node has died. Node Id: 1\n\tthe node was terminated",
            "was lost with its machine",
        ),
        ("The actor 1 is unavailable: The actor is temporarily unavailable", "cannot be reached"),
        (
            f"{_DIED}SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2. "
            "End of file. Some common causes include: (1) the process was killed by the OOM killer",
            "has ended (Worker unexpectedly exits with a connection error code 2. End of file)",
        ),
    ],
)
def test_why_a_worker_was_lost_is_told_apart(text: str, why: str) -> None:
    assert why in why_lost(text)


def test_an_actor_has_the_share_of_memory_that_it_has_of_the_cpus_or_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned = {"CPU": 2.0}
    context = SimpleNamespace(get_assigned_resources=lambda: assigned, get_node_id=lambda: "b")
    nodes = [{"NodeID": "a", "Resources": {"CPU": 64.0}}, {"NodeID": "b", "Resources": {"CPU": 8.0}}]
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert memory_share("auto") == 2 / 8
    assigned["GPU"] = 0.5
    assert memory_share("auto") == 0.5
    assert memory_share("cpu") == 2 / 8
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    assert memory_share("auto") == 1.0
