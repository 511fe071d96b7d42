"""A device whose memory runs out: every prompt is answered all the same, as the model's own forward answers it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.engines.base import Answer, EarlyExits, Treatment
from prefillcli.engines.torch import TorchEngine
from prefillcli.errors import ResourceError
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits, Pack, free_packs, split_pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk.continuations import Beginning, Speculation, Writing
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.walk import HeldParts, LayerWalk
from tests.unit.walk.test_walk import NO, ONE_PACK, YES, Prompt, mixed, model_of, three_levels, tokens, wanted

HELD = Limits(110, 10**6, held_tokens=10**6)
LABELS = LabelSet.of([[YES], [NO]])

Fails = Callable[[int, int], bool]  # by the number of a layer's call, and its tokens


@contextmanager
def engine_of(
    family: str, fails: Fails, *, limits: Limits = ONE_PACK, chunk: int = 256, **given: Any
) -> Iterator[TorchEngine]:
    """An engine whose layers run out of memory."""
    model = model_of(family)
    model.set_attn_implementation(ATTENTION)
    calls = 0

    def fail(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal calls
        calls += 1
        if fails(calls, inputs[0].shape[1]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

    hooks = [layer.register_forward_pre_hook(fail) for layer in model.get_decoder().layers]
    try:
        with closing(TorchEngine(LayerWalk(model, chunk_tokens=chunk), limits=limits, **given)) as engine:
            yield engine
    finally:
        for hook in hooks:
            hook.remove()


def never(call: int, size: int) -> bool:
    return False


def answers_of(engine: TorchEngine, packs: list[Pack], treatment: Treatment | None = None) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for pack in packs:
        ticks: list[float] = []
        given = {} if treatment is None else {"treatment": treatment}
        answers = [each for part in engine.answer(pack, lambda prompt: LABELS, ticks.append, **given) for each in part]
        assert sum(ticks) == pytest.approx(len(pack.tokens))
        assert sorted(answer.prompt for answer in answers) == sorted(pack.prompts), "each prompt once"
        found |= {answer.prompt: answer for answer in answers}
    return found


def assert_right(
    found: dict[int, Answer], family: str, make: Callable[[], list[Prompt]], *, without: Collection[int] = ()
) -> None:
    logprobs = torch.log_softmax(wanted(family, make).double(), dim=-1)[:, [YES, NO]].exp()
    assert sorted(found) == list(range(len(logprobs)))
    numbers = [number for number in sorted(found) if number not in without]
    rows = torch.tensor(np.exp(np.stack([found[number].logprobs for number in numbers])))
    torch.testing.assert_close(rows, logprobs[numbers], atol=1e-5, rtol=0)
    assert all(found[number].failure is None for number in numbers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("call", [1, 4, 9, 30])
def test_a_layer_that_does_not_fit_is_called_again_for_less(
    family: str, call: int, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = make_plan(mixed(), HELD).packs
    with engine_of(family, lambda number, _: number == call, limits=HELD) as engine:
        found = answers_of(engine, packs)
        reduced = engine.reduced()
    assert_right(found, family, mixed)
    assert reduced is not None
    assert (reduced.failures, reduced.chunk_tokens, reduced.pack_tokens) == (1, 128, None)
    assert capsys.readouterr().err.count("warning: memory ran out on cpu") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("limits", [ONE_PACK, HELD, Limits(400, 10**6)])
def test_chunks_and_packs_are_halved_until_they_fit(limits: Limits, capsys: pytest.CaptureFixture[str]) -> None:
    packs = make_plan(mixed(), limits).packs
    largest: list[int] = []

    def too_large(number: int, size: int) -> bool:
        largest.append(size)
        return size > 64

    with engine_of("llama", too_large, limits=limits) as engine:
        found = answers_of(engine, packs)
        reduced = engine.reduced()
    assert_right(found, "llama", mixed)
    assert reduced is not None
    assert reduced.chunk_tokens <= 64
    assert capsys.readouterr().err.count("memory ran out") == 1, "it is said once"
    assert max(largest[-20:]) <= 64, "what follows is as small from the start"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_held_keys_and_values_that_are_gone_are_computed_again(family: str) -> None:
    """A layer lets go of what no later pack holds as soon as it is done: the second try needs it once more."""
    packs = make_plan(mixed(), HELD).packs
    last = max(number for number, pack in enumerate(packs) if pack.held)
    state = {"pack": -1, "failed": 0}

    def at_the_last_layers(number: int, size: int) -> bool:
        state["calls"] = state.get("calls", 0) + 1
        fails = state["pack"] == last and state["calls"] >= 3 and state["failed"] < 2
        state["failed"] += fails
        return fails

    found: dict[int, Answer] = {}
    with engine_of(family, at_the_last_layers, limits=HELD) as engine:
        for number, pack in enumerate(packs):
            state |= {"pack": number, "calls": 0}
            found |= answers_of(engine, [pack])
    assert state["failed"] == 2
    assert_right(found, family, mixed)


def test_a_beginning_that_was_computed_again_is_found_again() -> None:
    ids = np.sort(tokens(np.random.default_rng(6), 4))
    prompts = [ids[at] for at in ([0, 1], [0], [0, 1, 2])]
    packs = make_plan(prompts, Limits(1, 150, held_tokens=2), "fifo").packs
    layers = len(model_of("llama").get_decoder().layers)
    last = 2 * layers + 2  # packs of one token: the second layer of the third
    with engine_of("llama", never) as engine:
        whole = answers_of(engine, packs)
    with engine_of("llama", lambda number, size: number in (last, last + 1)) as engine:
        found = answers_of(engine, packs)
        assert engine.reduced() is not None
    for prompt, answer in found.items():
        np.testing.assert_allclose(answer.logprobs, whole[prompt].logprobs, atol=1e-5)


def test_packs_that_stand_alone_are_answered_so_by_a_worker() -> None:
    packs = make_plan(mixed(), HELD).packs
    found: dict[int, Answer] = {}
    with engine_of("llama", lambda number, size: number in (17, 60), limits=HELD, chunk=512) as engine:
        for work in free_packs(packs):
            answers_of(engine, [refill for refill in work.refills if not engine.holds(refill.block)])
            found |= answers_of(engine, [work.pack])
    assert_right(found, "llama", mixed)


def test_what_is_computed_is_counted_with_what_was_computed_twice() -> None:
    (pack,) = make_plan(three_levels(), ONE_PACK).packs
    with engine_of("llama", never) as engine:
        whole = answers_of(engine, [pack])
    assert sum(answer.computed_tokens for answer in whole.values()) == len(pack.tokens)
    half = {"failures": 2, "chunk_tokens": 64, "pack_tokens": len(pack.tokens) // 2}
    with engine_of("llama", never, reduced=half) as engine:
        split = answers_of(engine, [pack])
    parts = split_pack(pack, len(pack.tokens) // 2)
    assert len(parts) > 1
    assert sum(answer.computed_tokens for answer in split.values()) == sum(len(part.tokens) for part in parts)


def test_another_attempt_begins_with_what_fitted() -> None:
    packs = make_plan(mixed(), HELD).packs
    sizes: list[int] = []

    def watch(number: int, size: int) -> bool:
        sizes.append(size)
        return False

    before = {"failures": 3, "chunk_tokens": 64, "pack_tokens": 90}
    with engine_of("llama", watch, limits=HELD, reduced=before) as engine:
        assert engine.limits.tokens == 90, "later windows are planned so"
        found = answers_of(engine, packs)
        assert engine.reduced() is not None
    assert max(sizes) <= 64
    assert_right(found, "llama", mixed)


def test_readings_between_layers_survive() -> None:
    (pack,) = make_plan(three_levels(), ONE_PACK).packs
    treatment = Treatment(EarlyExits(observed=(0, 1)))
    with engine_of("llama", never) as engine:
        whole = answers_of(engine, [pack], treatment)
    with engine_of("llama", lambda number, size: number in (3, 6), chunk=128) as engine:
        found = answers_of(engine, [pack], treatment)
    for prompt, answer in found.items():
        assert len(answer.readings) == 2
        for own, other in zip(answer.readings, whole[prompt].readings, strict=True):
            np.testing.assert_allclose(own.hidden, other.hidden, atol=1e-4)
    assert_right(found, "llama", three_levels)


def test_what_does_not_fit_at_all_ends_the_run_and_says_why() -> None:
    prompts = [tokens(np.random.default_rng(0), 300)]
    with (
        engine_of("llama", lambda number, size: True) as engine,
        pytest.raises(ResourceError, match=r"300 tokens that cannot .* chunks of 64 tokens: CUDA out"),
    ):
        answers_of(engine, make_plan(prompts, ONE_PACK).packs)


REFUSALS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
]


def refuse(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[[Pack], bool], error: Exception = REFUSALS[0]
) -> list[Pack]:
    """Memory runs out on such packs, behind their first layer. Returns the packs that are walked."""
    walked: list[Pack] = []
    put_nodes, read_logits = HeldParts.put_nodes, LayerWalk.read_logits

    def read(walk: LayerWalk, pack: Pack, *others: Any) -> Iterator[torch.Tensor]:
        walked.append(pack)
        return read_logits(walk, pack, *others)

    def put(held: HeldParts, *others: Any) -> None:
        if refused(walked[-1]):
            raise error
        put_nodes(held, *others)

    monkeypatch.setattr(LayerWalk, "read_logits", read)
    monkeypatch.setattr(HeldParts, "put_nodes", put)
    return walked


def larger_than(most: int) -> Callable[[Pack], bool]:
    return lambda pack: pack.held_tokens + len(pack.tokens) > most


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("limits", "error"),
    [(HELD, REFUSALS[0]), (Limits(400, 10**6, held_tokens=10**6), REFUSALS[1]), (ONE_PACK, REFUSALS[2])],
    ids=["device", "python", "kernel"],
)
def test_a_prompt_that_does_not_fit_is_left_out_and_all_others_are_answered(
    limits: Limits, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = mixed()
    most = sorted(map(len, prompts))[-4]
    packs = make_plan(prompts, limits).packs
    walked = refuse(monkeypatch, larger_than(most), error)
    with engine_of("llama", never, limits=limits) as engine:
        found = answers_of(engine, packs)
        assert engine.reduced() is not None
    failed = {number for number, answer in found.items() if answer.failure is not None}
    assert failed == {number for number, prompt in enumerate(prompts) if len(prompt) > most}
    assert failed
    for number in failed:
        assert "memory ran out on this prompt alone" in str(found[number].failure)
        assert np.isnan(found[number].logprobs).all()
    assert_right(found, "llama", mixed, without=failed)
    assert len(walked) < 20 * len(failed) + 2 * len(packs)


@pytest.mark.nightly
def test_what_follows_a_prompt_that_does_not_fit_is_as_large_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [tokens(np.random.default_rng(0), 900)]
    refuse(monkeypatch, larger_than(800))
    with engine_of("llama", never, limits=ONE_PACK) as engine:
        assert answers_of(engine, make_plan(long, ONE_PACK).packs)[0].failure is not None
        found = answers_of(engine, make_plan(three_levels(), ONE_PACK).packs)
        reduced = engine.reduced()
    assert_right(found, "llama", three_levels)
    assert reduced is not None
    assert (reduced.chunk_tokens, reduced.pack_tokens) == (256, None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("limits", [HELD, Limits(400, 10**6, held_tokens=10**6)])
def test_where_no_prefix_can_be_held_prompts_are_read_from_their_beginning(
    family: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = make_plan(mixed(), limits).packs
    assert any(pack.kept_nodes for pack in packs)
    refuse(monkeypatch, lambda pack: bool(pack.kept_nodes))
    with engine_of(family, never, limits=limits) as engine:
        found = answers_of(engine, packs)
    assert_right(found, family, mixed)


def test_an_error_that_says_nothing_of_memory_is_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = refuse(monkeypatch, lambda pack: True, RuntimeError("shapes do not match"))
    with engine_of("llama", never) as engine, pytest.raises(RuntimeError, match="shapes"):
        answers_of(engine, make_plan(mixed(), ONE_PACK).packs)
    assert len(walked) == 1


words = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=9), st.integers(1, 40), st.sampled_from([0, 6, 10**6]), st.integers(4, 40))
def test_split_packs_read_the_same_paths_and_keep_the_same_nodes(
    texts: list[list[int]], most: int, held: int, size: int
) -> None:
    prompts = [np.asarray(text, dtype=np.int32) for text in texts]
    nodes: dict[object, list[int]] = {}  # what is held by each key

    def path(pack: Pack, node: int) -> list[int]:
        own = pack.tokens[pack.offsets[node] : pack.offsets[node + 1]].tolist()
        if pack.parents[node] >= 0:
            return path(pack, pack.parents[node]) + own
        return [token for at in pack.attach[node] for token in nodes[pack.held[at].key]] + own

    answered: list[int] = []
    for pack in make_plan(prompts, Limits(size, 10**6, held_tokens=held)).packs:
        pack = replace(pack, variant="formal")
        parts = split_pack(pack, most)
        for part in parts:
            assert part.variant == "formal"
            for node, numbers in part.reads:
                answered += numbers
                for number in numbers:
                    assert path(part, node) == prompts[number].tolist()
            for node, key in part.kept_nodes.items():
                nodes[key] = part.tokens[part.offsets[node] : part.offsets[node + 1]].tolist()
            assert part is pack or part.keep >= pack.keep
        made = {key for part in parts for key in part.kept_nodes.values()}
        assert made == set(pack.kept_nodes.values())
        total = sum(len(part.tokens) for part in parts)
        assert total >= len(pack.tokens)
    assert sorted(answered) == list(range(len(prompts)))


class Everyone(NamedTuple):
    """Texts behind all prompts."""

    prompts: tuple[Prompt, ...]
    writing: Writing = Writing(4, speculation=Speculation("off", tokens=0))
    again: bool = False

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        return {each.prompt: Beginning(self.prompts[each.prompt], (5, 7), str(each.prompt)) for each in answers}

    def of(self, prompts: Collection[int]) -> Everyone:
        return self


@pytest.mark.parametrize("call", [1, 2])
def test_a_pack_that_does_not_fit_while_it_is_kept_is_scored_without(call: int) -> None:
    """Its rows come back without texts, to be read again; half as large packs are kept."""
    prompts = mixed()
    (pack,) = make_plan(prompts, ONE_PACK).packs
    size = len(pack.tokens)
    limits = replace(ONE_PACK, kept_tokens=size, kept_held_tokens=0, kept_packs=True, written_tokens=10**6)
    treatment = Treatment(continuations=Everyone(tuple(prompts)))
    with engine_of("llama", lambda number, _: number == call, limits=limits, chunk=2048) as engine:
        found = answers_of(engine, [pack], treatment)
        assert engine.limits.kept_tokens == size // 2
        reduced = engine.reduced()
        assert reduced is not None
        assert (reduced.failures, reduced.chunk_tokens, reduced.pack_tokens) == (1, 2048, None), "and nothing else"
        halves = make_plan(prompts, engine.limits.for_texts()).packs
        assert len(halves) > 1
        again = answers_of(engine, halves, treatment)
    assert_right(found, "llama", mixed)
    assert {answer.continuation for answer in found.values()} == {None}
    kept = {number for half in halves if engine.limits.can_keep(half) for number in half.prompts}
    assert kept
    for number, answer in again.items():
        assert (answer.continuation is not None) == (number in kept)


def test_where_memory_runs_out_while_texts_are_written_scores_and_texts_are_those_of_fewer_rows() -> None:
    prompts = three_levels()
    (pack,) = make_plan(prompts, ONE_PACK).packs
    limits = replace(ONE_PACK, kept_tokens=10**6, kept_packs=True, written_tokens=10**6)
    treatment = Treatment(continuations=Everyone(tuple(prompts)))
    with engine_of("llama", never, limits=limits, chunk=2048) as engine:
        whole = answers_of(engine, [pack], treatment)
    layers = len(model_of("llama").get_decoder().layers)
    with engine_of(
        "llama", lambda number, size: number > layers + 1 and size > 6, limits=limits, chunk=2048
    ) as engine:
        found = answers_of(engine, [pack], treatment)
        assert engine.reduced() is None, "nothing was scored twice"
    assert_right(found, "llama", three_levels)
    for number, answer in found.items():
        assert answer.continuation is not None
        assert answer.continuation.tokens == whole[number].continuation.tokens
