"""How many threads compute, and that the scores do not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.methods import layer_walk
from benchmarks.models import random_llama
from benchmarks.workloads import prompts_with_histories, random_prompt
from prefillcli.models.heads import label_numbers
from prefillcli.runtime.cores import Threads, affinity, choose_waiting, prepare, threads_for

ROOT = Path(__file__).parent.parent
CORES = len(affinity())


class Left:
    """What others leave of the cores, look by look."""

    def __init__(self, *cores: float | None) -> None:
        self._cores = list(cores)

    def cores(self, shortest: float = 0) -> float | None:
        return self._cores.pop(0)


@pytest.mark.parametrize(
    ("cores", "most", "threads"),
    [(2, 2, 2), (1.5, 2, 2), (1.4, 2, 1), (0, 2, 1), (0, 1, 1), (64, 64, 64), (40.2, 64, 40), (3, 64, 32), (0, 5, 3)],
)
def test_threads_fill_the_free_cores_but_half_of_them_run_in_any_case(cores: float, most: int, threads: int) -> None:
    assert threads_for(cores, most) == threads


def test_the_number_follows_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("prefillcli.runtime.cores.allowed", lambda: 4)
    threads = Threads("auto", Left(2.2, None, 3.9, 0.3))  # type: ignore[arg-type]
    assert torch.get_num_threads() == threads.most == 4
    assert threads.ran == []
    seen = []
    for _ in range(4):
        threads.adjust()
        seen.append(torch.get_num_threads())
    assert seen == [2, 2, 4, 2]
    assert threads.ran == [2, 4]


def test_a_number_that_was_asked_for_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(3)
    threads.adjust()
    assert torch.get_num_threads() == 3
    assert threads.ran == [3, 3]


def test_a_number_in_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.runtime.cores.allowed", lambda: 4)
    torch.set_num_threads(2)
    for name in ("OMP_NUM_THREADS", "OMP_PLACES"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv(name, "1")
        threads = Threads("auto")
        threads.adjust()
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("left", "limited", "policy"),
    [(2.0, False, None), (1.6, False, None), (1.2, False, "PASSIVE"), (2.0, True, "PASSIVE")],
)
def test_threads_spin_where_the_cores_are_free_and_sleep_elsewhere(
    monkeypatch: pytest.MonkeyPatch, left: float, limited: bool, policy: str | None
) -> None:
    monkeypatch.setattr("prefillcli.runtime.cores.allowed", lambda: 2)
    monkeypatch.setattr("prefillcli.runtime.cores.quotas", lambda: ["a quota"] * limited)
    monkeypatch.setattr("prefillcli.runtime.cores.Left", lambda: Left(left))
    environment: dict[str, str] = {}
    prepare("auto", environment)
    choose_waiting(environment)
    assert environment.get("OMP_WAIT_POLICY") == policy


def test_how_threads_wait_is_not_changed_where_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefillcli.runtime.cores._free", lambda left: False)
    nothing: dict[str, str] = {}
    prepare("auto", nothing)
    choose_waiting(nothing)
    assert nothing["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 1 <= int(nothing["RAYON_NUM_THREADS"]) <= CORES
    said = {"GOMP_SPINCOUNT": "7", "RAYON_NUM_THREADS": "9", "OMP_NUM_THREADS": "5"}
    said |= {"LRU_CACHE_CAPACITY": "1024", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    before = dict(said)
    prepare("auto", said)
    choose_waiting(said)
    assert said == before
    counted: dict[str, str] = {}
    prepare(3, counted)
    choose_waiting(counted)
    kept = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "32")
    assert counted == {"OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": "3", **kept}


GROWN = """
import os, sys
from prefillcli.runtime.cores import prepare
if sys.argv[1] == "prepared":
    prepare(1)
import torch
from prefillcli.runtime.memory import proportional_memory
torch.set_num_threads(1)
weight, rows = torch.randn(768, 576).bfloat16(), torch.randn(500, 576).bfloat16()
torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
before = proportional_memory(os.getpid())
for count in range(100, 500):
    torch.ops.mkldnn._linear_pointwise(rows[:count], weight, None, "none", [], "")
print(proportional_memory(os.getpid()) - before)
"""


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no such products")
def test_products_of_many_shapes_leave_hardly_any_code_behind() -> None:
    """oneDNN generates code for each number of rows."""
    grown = {}
    kept = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    clean = {
        name: value for name, value in os.environ.items() if name not in kept
    }  # a command in this process sets them
    for way in ("as it is", "prepared"):
        command = [sys.executable, "-W", "ignore", "-c", GROWN, way]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=clean)
        grown[way] = int(done.stdout)
    assert grown["prepared"] < 80e6
    assert grown["prepared"] < grown["as it is"] / 2


def test_fewer_and_more_threads_in_turn_leave_none_behind() -> None:
    states = torch.randn(256, 256)

    def compute(threads: int) -> None:
        torch.set_num_threads(threads)
        (states @ states).softmax(-1)

    def come_to(number: int) -> bool:
        """Whether so many threads are left; ending takes them a moment."""
        end = time.monotonic() + 10
        while (running := len(os.listdir("/proc/self/task"))) > number and time.monotonic() < end:
            time.sleep(0.001)
        return running <= number

    compute(4)
    most = len(os.listdir("/proc/self/task"))
    for threads in (2, 4, 1, 3) * 10:
        compute(threads)
    compute(4)
    assert come_to(most)
    compute(2)
    assert come_to(most - 2), "threads that are not needed end"


def test_scores_do_not_depend_on_the_number_of_threads() -> None:
    model = random_llama("25M", torch.float32)
    prompts = [*prompts_with_histories(2, 3, 100, 20, 8_000), random_prompt(150, 8_000)]
    scores = {}
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        logits = layer_walk(model, prompts, 64)
        logprobs = np.stack(label_numbers(logits, list(range(len(prompts))), [((5, 6), (7,))] * len(prompts)))
        scores[threads] = 1 / (1 + np.exp(logprobs[:, 1] - logprobs[:, 0]))
    assert np.ptp(scores[1]) > 1e-3, "rows must differ enough to tell a wrong one"
    for threads in (2, 4):
        assert np.abs(scores[threads] - scores[1]).max() <= 1e-6


@pytest.mark.nightly
@pytest.mark.slow
def test_beside_others_the_command_sleeps_while_it_waits_and_tells_how_many_ran(tmp_path: Path) -> None:
    """A busy program is on every core. OMP_DISPLAY_ENV makes the OpenMP library itself say how long threads spin."""
    command = [sys.executable, "-m", "prefillcli", "score", str(ROOT / "samples" / "labeling.parquet"), "--limit", "3"]
    command += ["-m", str(ROOT / "samples" / "models" / "draft"), "-o", str(tmp_path / "out.parquet"), "--quiet"]
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        done = subprocess.run(
            command, env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True
        )
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stderr
    assert "GOMP_SPINCOUNT = '0'" in done.stderr
    ran = json.loads((tmp_path / "out.run.json").read_text())["threads"]
    assert 1 <= ran["min"] <= ran["max"] <= CORES
