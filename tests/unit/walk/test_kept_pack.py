"""What is kept of a pack: on the device or in host memory, for the wanted rows alone, in groups that fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import pytest
import torch

from prefillcli.models.law import memory_law
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk import decoding as behind
from prefillcli.walk.continuations import Continuation, Writing
from prefillcli.walk.decoding import KeptPack, RowRoom, write_behind
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.generated import ONE_PACK, Reference, assert_same_texts, beginnings, generated, greedy, walking
from tests.unit.walk.late_copies import LateCopies
from tests.unit.walk.test_recurrent import RECURRENT
from tests.unit.walk.test_recurrent import model_of as hybrid_of
from tests.unit.walk.test_walk import model_of, three_levels

ROWS = beginnings(three_levels())
SEVERAL_PACKS = Limits(250, 10**6, held_tokens=10**6)
FAMILIES = ["llama", "gemma3_text", "lfm2", "qwen3_next"]  # with windows, and with states beside K,V


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """What kept packs copy with, as a GPU does."""
    made: list[LateCopies] = []

    def copies_for(device: torch.device) -> LateCopies:
        made.append(LateCopies())
        return made[-1]

    monkeypatch.setattr(behind, "copies_for", copies_for)
    return made


def model_named(family: str) -> torch.nn.Module:
    return hybrid_of(family) if family in RECURRENT else model_of(family)


@cache
def references(family: str) -> tuple[Writing, list[Reference]]:
    """Texts of transformers, some of which end at a stop token."""
    first = generated(model_named(family), ROWS[0], greedy(10)).tokens
    writing = greedy(10, {first[5]})
    return writing, [generated(model_named(family), row, writing) for row in ROWS]


def walk_of(family: str) -> AbstractContextManager[LayerWalk]:
    return walking(model_named(family))


def packs_of(limits: Limits = ONE_PACK) -> list[Pack]:
    return make_plan([row.prompt for row in ROWS], limits).packs


def texts_of(
    walk: LayerWalk,
    writing: Writing,
    wanted: Callable[[int], bool] = lambda prompt: True,
    *,
    limits: Limits = ONE_PACK,
    on_host: bool = False,
    room: RowRoom | None = None,
) -> dict[int, Continuation | None]:
    """By prompt, of those that are wanted."""
    found: dict[int, Continuation | None] = {}
    for pack in packs_of(limits):
        kept = KeptPack(pack, on_host=on_host)
        list(walk.read_logits(pack, kept=kept))
        pairs = [(read, n) for read, (_, numbers) in enumerate(pack.reads) for n in numbers if wanted(n)]
        texts = write_behind(walk, kept, [(read, ROWS[number]) for read, number in pairs], writing, room=room)
        found |= {number: text for (_, number), text in zip(pairs, texts, strict=True)}
    return found


def assert_right(found: dict[int, Continuation | None], wanted: list[Reference], writing: Writing) -> None:
    texts = [text for _, text in sorted(found.items()) if text is not None]
    assert len(texts) == len(found), "a row has no text"
    assert assert_same_texts(texts, [wanted[number] for number in sorted(found)], writing) <= 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [ONE_PACK, SEVERAL_PACKS], ids=["one pack", "held prefixes"])
def test_what_is_kept_in_host_memory_is_back_before_texts_are_written(
    family: str, limits: Limits, streams: list[LateCopies]
) -> None:
    writing, wanted = references(family)
    with walk_of(family) as walk:
        found = texts_of(walk, writing, lambda prompt: prompt % 3 > 0, limits=limits, on_host=True)
    assert_right(found, wanted, writing)
    assert streams
    assert all(stream.queue for stream in streams), "nothing left the device"


def test_layers_leave_one_by_one_and_the_host_waits_for_none(streams: list[LateCopies]) -> None:
    with walk_of("llama") as walk:
        (pack,) = packs_of()
        kept = KeptPack(pack, on_host=True)
        list(walk.read_logits(pack, kept=kept))
        (stream,) = streams
        assert stream.most_waiting == 2, "K and V of a layer leave while the next one is computed"
        sent = len(stream.queue)
        kept.select([0, 3])
        assert stream.waited_for_all == 0
        assert stream.done == len(stream.queue) > sent
    both = kept.parts_of(0) | kept.parts_of(3)
    back = sum(each.target.shape[0] for each in stream.queue[sent:])
    assert back == 2 * len(walk.layers) * sum(both.values()), "what the two reads see, once"


@pytest.mark.parametrize(
    ("family", "limits"), [("llama", SEVERAL_PACKS), ("gemma3_text", ONE_PACK), ("qwen3_next", SEVERAL_PACKS)]
)
def test_texts_of_some_rows_are_those_they_have_among_all(family: str, limits: Limits) -> None:
    writing, wanted = references(family)
    with walk_of(family) as walk:
        assert_right(texts_of(walk, writing, lambda prompt: prompt in (1, 4, 5), limits=limits), wanted, writing)


def test_what_only_others_see_is_let_go_of() -> None:
    with walk_of("llama") as walk:
        (pack,) = packs_of()
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))
        assert kept.tokens_here == len(pack.tokens)
        whole = [layer.keys_values for layer in kept.select([0]).layers]
        reads = range(len(pack.reads))
        kept.drop_others(reads)
        for before, after in zip(whole, kept.select(reads).layers, strict=True):
            assert before[0] is after.keys_values[0], "all is wanted: nothing is copied"
        kept.drop_others([2])
        rows = kept.select([2])
        length = sum(kept.parts_of(2).values())
        assert kept.tokens_here == length < len(pack.tokens) / 2
        for layer in rows.layers:
            for each in layer.keys_values:
                assert each.shape[2] == length
                assert each.untyped_storage().nbytes() == each.nbytes, "a part of something larger"
        assert rows.paths == [[(0, length, 0)]], "one run from the first token on"
        kept.drop_others([])
        assert kept.tokens_here == 0


@pytest.mark.parametrize(("on_host", "most"), [(False, 50), (True, 200), (True, 500)])
def test_rows_that_do_not_fit_together_are_written_one_group_after_the_other(
    on_host: bool, most: int, streams: list[LateCopies]
) -> None:
    writing, wanted = references("llama")
    (pack,) = packs_of()
    here = 0 if on_host else len(pack.tokens)
    room = RowRoom(most + here)
    with walk_of("llama") as walk:
        found = texts_of(walk, writing, on_host=on_host, room=room)
        kept = KeptPack(pack, on_host=on_host)
        list(walk.read_logits(pack, kept=kept))
        rows = [(read, ROWS[n]) for read, (_, numbers) in enumerate(pack.reads) for n in numbers]
        groups = list(room.groups(kept, list(enumerate(rows)), writing, 10**6))
    assert len(groups) > 1
    for group in groups:
        parts = {}
        for number in group:
            parts |= kept.parts_of(rows[number][0])
        texts = sum(room.of_text(rows[number][1], writing) for number in group)
        assert texts + (sum(parts.values()) if on_host else here) <= room.most_tokens
    missing = [number for number, text in found.items() if text is None]
    alone = [sum(kept.parts_of(read).values()) + room.of_text(row, writing) for read, row in rows]
    assert len(missing) == (sum(size > most for size in alone) if on_host else 0), "no room for the prompt itself"
    assert_right({number: text for number, text in found.items() if text is not None}, wanted, writing)


def test_a_pass_reads_no_more_tokens_than_a_chunk() -> None:
    writing, _ = references("llama")
    (pack,) = packs_of()
    rows = [(read, ROWS[n]) for read, (_, numbers) in enumerate(pack.reads) for n in numbers]
    groups = list(RowRoom().groups(KeptPack(pack), list(enumerate(rows)), writing, 40))
    assert {len(group) for group in groups[:-1]} == {40 // (writing.speculation.tokens + 1)}
    assert sorted(number for group in groups for number in group) == list(range(len(rows)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_host", [False, True])
def test_where_memory_runs_out_fewer_rows_are_written_together(on_host: bool, streams: list[LateCopies]) -> None:
    writing, wanted = references("llama")
    room, calls = RowRoom(), []

    with walk_of("llama") as walk:
        (pack,) = packs_of()
        kept = KeptPack(pack, on_host=on_host)
        list(walk.read_logits(pack, kept=kept))

        def fail(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            calls.append(inputs[0].shape[1])
            if calls[-1] > 12:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

        with walk.layers.use(1) as layer:
            handle = layer.register_forward_pre_hook(fail)
        rows = [(read, ROWS[n]) for read, (_, numbers) in enumerate(pack.reads) for n in numbers]
        numbers = [n for _, own in pack.reads for n in own]
        try:
            texts = write_behind(walk, kept, rows, writing, room=room)
        finally:
            handle.remove()
    assert max(calls) > 12
    assert max(calls[-5:]) <= 12
    assert room.most_rows is not None
    assert_right(dict(zip(numbers, texts, strict=True)), wanted, writing)


def test_a_row_for_which_memory_runs_out_alone_has_no_text() -> None:
    writing, _ = references("llama")
    with walk_of("llama") as walk:
        (pack,) = packs_of()
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))

        def fail(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

        with walk.layers.use(0) as layer:
            handle = layer.register_forward_pre_hook(fail)
        try:
            texts = write_behind(walk, kept, [(0, ROWS[0]), (1, ROWS[1])], writing)
        finally:
            handle.remove()
    assert texts == [None, None]
    assert kept.tokens_here == 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_next"])
def test_the_memory_law_counts_what_is_kept(family: str) -> None:
    with walk_of(family) as walk:
        (pack,) = packs_of()
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))
        rows = kept.select(range(len(pack.reads)))
        law = memory_law(walk.model.config, torch.float32)
    both = [each for layer in rows.layers for each in layer.keys_values or ()]
    assert sum(each.untyped_storage().nbytes() for each in both) == law.all_key_values * len(pack.tokens)
    states = [state for layer in rows.layers for own in layer.states for state in own]
    tensors = [each for state in states for x in (state.conv_states, state.recurrent_states) for each in x.values()]
    taken = sum(each.nbytes for each in tensors if each is not None)
    assert law.states * len(pack.reads) / 2 <= taken <= law.states * len(pack.reads)
