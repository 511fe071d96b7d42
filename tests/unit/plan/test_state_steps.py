"""With a step, nodes are cut at its multiples alone, so that a recurrent layer reads every path in the same pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from tests.unit.plan.test_plan import prompts_of_few_words, spelled

steps = st.sampled_from([1, 2, 3, 4, 8])


def pieces(prompts: list[np.ndarray], step: int) -> int:
    """Tokens of all distinct pieces: whole ones, and the one that a prompt ends with."""
    found = {tuple(prompt[: start + step]): min(step, len(prompt) - start) for prompt in prompts
             for start in range(0, len(prompt), step)}  # fmt: skip
    return sum(found.values())


@given(prompts_of_few_words, steps, st.sampled_from([12, 30, 10**6]), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_every_node_begins_at_a_multiple_and_every_prompt_is_whole(
    prompts: list[np.ndarray], step: int, tokens: int, held: int
) -> None:
    limits = Limits(tokens, 10**6, held_tokens=held, whole_nodes=True, node_tokens=1, state_step=step)
    packs = make_plan(prompts, limits).packs
    assert spelled(packs, limits) == {number: list(prompt) for number, prompt in enumerate(prompts)}
    for pack in packs:
        assert all(start % step == 0 for start in pack.starts)
        assert all((node.start + node.length) % step == 0 for node in pack.held)


@given(prompts_of_few_words, steps)
@settings(max_examples=150, deadline=None)
def test_every_piece_is_computed_once(prompts: list[np.ndarray], step: int) -> None:
    plan = make_plan(prompts, Limits(10**6, 10**6, whole_nodes=True, state_step=step))
    least = pieces(prompts, step)
    assert least <= plan.computed_tokens <= 1.01 * least


def test_what_windows_share_ends_at_a_multiple() -> None:
    rng = np.random.default_rng(0)
    history = rng.integers(0, 90, 217).astype(np.int32)
    windows = [[np.append(history, [window, row]).astype(np.int32) for row in range(6)] for window in range(2)]
    limits = Limits(10**6, 10**6, held_tokens=10**6, whole_nodes=True, node_tokens=3, state_step=16)
    first = make_plan(windows[0], limits, block_tokens=64)
    assert [end for end, _ in first.carried] == [208]
    second = make_plan(windows[1], limits, carried=first.carried, block_tokens=64)
    assert [len(pack.tokens) for pack in second.given] == [208]
    assert second.computed_tokens == 6 * (217 + 2 - 208)
