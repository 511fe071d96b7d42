"""What is kept in host memory of a GPU comes and goes beside what is computed, and is there when it is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from prefillcli.models.law import memory_law, pack_limits
from prefillcli.plan.pack import Held, Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk import walk as copies
from prefillcli.walk.walk import HeldPart, HeldParts
from tests.unit.walk.families import make_config
from tests.unit.walk.late_copies import LateCopies
from tests.unit.walk.test_leaving import LeaveAfter
from tests.unit.walk.test_leaving import walked as walked_with_exits
from tests.unit.walk.test_walk import assert_equal, mixed, model_of, three_levels, walked, wanted

SEVERAL_PACKS = Limits(110, 10**6, held_tokens=10**6)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """The walks of a test keep things in host memory as they do of a GPU; their streams."""
    made: list[LateCopies] = []

    def copies_for(device: torch.device) -> LateCopies:
        made.append(LateCopies())
        return made[-1]

    monkeypatch.setattr(copies, "copies_for", copies_for)
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_offloaded_keys_and_values_are_there_when_they_are_attended_to(family: str, streams: list[LateCopies]) -> None:
    found = walked(model_of(family), mixed(), chunk=41, limits=SEVERAL_PACKS, offload_held=True)
    assert_equal(found, wanted(family, mixed))
    (stream,) = streams
    assert stream.queue, "nothing was offloaded"


def test_offloading_waits_for_no_copy_on_the_host(streams: list[LateCopies]) -> None:
    walked(model_of("llama"), mixed(), chunk=41, limits=SEVERAL_PACKS, offload_held=True)
    (stream,) = streams
    assert stream.waited_for_all == 0
    assert 1 < stream.most_waiting < len(stream.queue) / 4, "one layer's copies at a time"


@pytest.mark.parametrize("peek", [False, True])
def test_reads_that_leave_do_not_mix_up_what_comes(peek: bool, streams: list[LateCopies]) -> None:
    """A layer that is peeked at asks twice, and after an early end the next pack begins with another layer."""
    prompts = mixed()
    leaving = {number: number % 2 for number in range(len(prompts)) if number % 3}
    rule = LeaveAfter(leaving, peek=peek)
    found = walked_with_exits(
        model_of("llama"), prompts, rule, chunk=41, limits=SEVERAL_PACKS, hidden_on_host=True, offload_held=True
    ).logits
    stay = [number for number in range(len(prompts)) if number not in leaving]
    assert_equal(torch.stack([found[number] for number in stay]), wanted("llama", mixed)[stay])
    assert len(streams) == 2


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rows_of_a_residual_stream_in_host_memory_come_and_go_in_order(family: str, streams: list[LateCopies]) -> None:
    found = walked_with_exits(model_of(family), three_levels(), None, chunk=31, hidden_on_host=True).logits
    assert_equal(torch.stack([found[number] for number in sorted(found)]), wanted(family, three_levels))
    (stream,) = streams
    assert stream.most_waiting <= 3, "a chunk comes, one is computed, one goes"


def test_a_part_of_a_node_is_fetched_alone(streams: list[LateCopies]) -> None:
    keys, values = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 6)
    wanted = keys[:, :, 3:7].clone(), values[:, :, 3:7].clone()
    parts = HeldParts(1, torch.device("cpu"), offload=True)
    parts.put(0, (0, 0), HeldPart(9, (keys, values)))
    for each in (keys, values):
        each.zero_()  # what the next layer computes takes its place
    (whole,) = make_plan([np.arange(9, dtype=np.int32)], Limits(100, 100)).packs
    (found,) = parts.keys_values(0, replace(whole, held=(Held((0, 0), 0, 5, 4, offset=3),)))
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_memory_that_is_let_go_of_too_early_would_be_noticed() -> None:
    stream = LateCopies()
    copied = stream.start(stream.host_memory((3,), torch.float32), torch.ones(3))
    with pytest.raises(AssertionError, match="let go"):
        stream.wait(copied)


def test_the_memory_law_counts_the_copies_that_are_on_their_way() -> None:
    law = memory_law(make_config("llama"), torch.bfloat16)

    def cost(kind: str) -> float:
        device = torch.device(kind)
        return pack_limits(law, budget=4 << 30, device=device, chunk_tokens=64, prefix_kv="offload").held_cost

    assert cost("cpu") == law.key_value / law.token
    assert cost("cuda") == 4 * cost("cpu")
