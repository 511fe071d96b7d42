"""What a layer calls on a CUDA device, counted with fake tensors: launches, and operators for which the host waits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.workloads import short_rows
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk import attention, narrow
from prefillcli.walk.cuda_kernels import takes_sequences
from prefillcli.walk.forest import ATTENTION, ForestAttention, register
from prefillcli.walk.walk import Arithmetic, LayerWalk
from tests.unit.walk.fake_cuda import DEVICE, fake_cuda
from tests.unit.walk.families import WINDOW, make_config
from tests.unit.walk.launches import CHUNK, LAUNCH_CASES, LaunchCase, layer_counts
from tests.unit.walk.test_walk import three_levels

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++"))), reason="fake CUDA tensors need a C++ compiler"
)

CHUNKS = -(-sum(map(len, LAUNCH_CASES["400 short rows"].prompts())) // CHUNK)


def case_chunks(case: LaunchCase) -> int:
    """The chunks of a case's pack."""
    (pack,) = make_plan(case.prompts(), Limits(10**7, 10**7)).packs
    return -(-len(pack.tokens) // CHUNK)


@pytest.mark.parametrize("name", ["400 short rows", "400 short rows, window of 128"])
def test_short_rows_take_few_launches_and_nobody_waits(name: str) -> None:
    counts = layer_counts(LAUNCH_CASES[name])
    assert counts.flash == CHUNKS
    assert counts.launches.total() < 80
    assert not counts.waits
    reads = layer_counts(LAUNCH_CASES[name], reads=True)
    assert reads.flash == 1
    assert reads.launches.total() < 80
    assert not reads.waits


@pytest.mark.parametrize("window", [None, 4096])
def test_each_level_of_the_tree_is_one_more_call(window: int | None) -> None:
    case = replace(LAUNCH_CASES["2 users x 40 posts"], window=window)
    for reads in (False, True):
        counts = layer_counts(case, reads=reads)
        assert not counts.waits
        assert counts.launches["merge"] == counts.flash - (1 if reads else case_chunks(case))
        assert counts.launches.total() < 60


@pytest.mark.parametrize("reads", [False, True])
def test_soft_caps_are_one_call_a_chunk(reads: bool) -> None:
    counts = layer_counts(LAUNCH_CASES["400 short rows, soft cap"], reads=reads)
    assert counts.launches["flex_attention"] == (1 if reads else CHUNKS)
    assert counts.launches.total() < 80
    assert not counts.waits


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("dtype", "window", "softcap"),
    [(torch.bfloat16, None, 30.0), (torch.bfloat16, WINDOW, 30.0), (torch.float32, WINDOW, None)],
)
def test_nobody_waits_for_explicit_scores(
    dtype: torch.dtype, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_ruled_out", {("flex", DEVICE): "not taken here"})
    case = LaunchCase(three_levels, window=window, softcap=softcap)
    assert not layer_counts(case, dtype=dtype).waits
    assert not layer_counts(case, dtype=dtype, reads=True).waits


@pytest.mark.parametrize(
    ("family", "kind", "launches"),
    [
        ("llama", None, 17),
        ("qwen3", None, 19),
        ("mistral", None, 17),
        ("gemma2", None, 29),
        ("llama", "int8", 28),
        ("llama", "fp8", 21),
    ],
)
def test_a_whole_layer_takes_few_launches_and_nobody_waits(
    family: str, kind: Any, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second layer on: the first copies the tables to the device."""
    register()
    monkeypatch.setattr(narrow, "_changes", lambda module: isinstance(module, nn.Linear))  # fake weights are a type
    (pack,) = make_plan(short_rows(20, 5, 60, 200), Limits(10**7, 10**7)).packs
    with fake_cuda() as counts, torch.inference_mode():
        with torch.device(DEVICE):
            config = make_config(family)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
        arithmetic = Arithmetic() if kind is None else narrow.in_smaller_numbers(model, kind)
        walk = LayerWalk(model.eval(), chunk_tokens=2048, arithmetic=arithmetic)
        state, waits, totals = walk.begin(pack), [], []
        with ForestAttention(len(pack.tokens)) as attention:
            for _ in walk.through_layers(state, attention, lambda tokens: None):
                waits.append(dict(counts.waits))
                totals.append(counts.launches.total())
                counts.waits.clear()
                counts.launches.clear()
        walk.close()
    assert len(waits) > 2
    assert not any(waits[1:])
    assert totals[1] == launches


def test_what_waits_is_counted() -> None:
    def waits(act: Callable[[torch.Tensor, torch.Tensor], object]) -> dict[str, int]:
        with fake_cuda() as counts:
            here, there = torch.zeros(3), torch.zeros(3, device=DEVICE)
            counts.waits.clear()
            act(here, there)
        return dict(counts.waits)

    assert waits(lambda here, there: there[there > 0]) == {"boolean index": 1}
    assert waits(lambda here, there: there.copy_(here)) == {"copy from the host": 1}
    assert waits(lambda here, there: here.to(DEVICE)) == {"copy from the host": 1}
    assert waits(lambda here, there: here.to(DEVICE, non_blocking=True)) == {"copy from the host": 1}
    assert waits(lambda here, there: there.cpu()) == {"copy to the host": 1}
    assert waits(lambda here, there: torch.as_tensor(np.zeros(3), device=DEVICE)) == {"copy from the host": 1}
    assert waits(lambda here, there: here.pin_memory().to(DEVICE, non_blocking=True)) == {}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"width": 256, "narrow": 256}, True),
        ({"width": 264, "narrow": 264}, False),
        ({"width": 20, "narrow": 20}, False),
        ({"narrow": 32}, False),
        ({"softcap": 30.0}, False),
    ],
)
def test_what_goes_through_sequences(change: dict[str, object], taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"dtype": torch.bfloat16, "width": 64, "narrow": 64, "softcap": None} | change
    with fake_cuda():
        query, value = (
            torch.empty(1, heads, 9, width, dtype=how["dtype"], device=DEVICE)
            for heads, width in ((4, how["width"]), (2, how["narrow"]))
        )
        assert takes_sequences(query, value, how["softcap"]) == taken
        monkeypatch.setattr(attention, "_ruled_out", {("varlen-flash", DEVICE): "it differed"})
        assert not takes_sequences(query, value, how["softcap"])
