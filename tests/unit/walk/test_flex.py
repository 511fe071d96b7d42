"""Flex attention over a whole forest: the walk with it against the eager forward, its masks against brute force.

On a CPU, PyTorch computes it with the same masks and score functions, but without a compiled kernel: those for CPUs
give no log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from prefillcli.plan.pack import Held, Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.walk import attention, attention_checks, cuda_kernels, forest
from prefillcli.walk.attention import attend_blockwise
from prefillcli.walk.attention_checks import check_path
from prefillcli.walk.cuda_kernels import BLOCK, ForestMask, attend_by_flex, forest_mask
from prefillcli.walk.layout import KeyWindow, Tree
from tests.unit.walk.families import FAMILIES
from tests.unit.walk.test_walk import assert_equal, mixed, model_of, walked, wanted

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
OTHERS = [name for name in FAMILIES if name != "gemma2"]
WINDOWS = (None, KeyWindow(7), KeyWindow(150), KeyWindow(9, aligned=True))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All attention goes through flex attention; gives the number of queries of each call."""
    calls: list[int] = []

    def counted(query: Tensor, *args: object, **kwargs: object) -> object:
        calls.append(query.shape[2])
        return flex_attention(query, *args, **kwargs)

    monkeypatch.setattr(cuda_kernels, "compiled_flex", lambda: counted)
    monkeypatch.setattr(forest, "takes_flex", lambda query, value, softcap: True)
    monkeypatch.setattr(forest, "takes", lambda *shapes: False)
    return calls


@pytest.mark.parametrize("family", ["gemma2", *(pytest.param(name, marks=pytest.mark.matrix) for name in OTHERS)])
def test_the_walk_by_flex_attention_equals_the_eager_forward(family: str, uncompiled: list[int]) -> None:
    model, limits = model_of(family), Limits(110, 10**6, held_tokens=10**6)
    assert any(pack.held for pack in make_plan(mixed(), limits).packs)
    assert_equal(walked(model, mixed(), chunk=97), wanted(family, mixed))
    uncompiled.clear()
    assert_equal(walked(model, mixed(), chunk=61, limits=limits), wanted(family, mixed))
    assert uncompiled


def test_a_chunk_is_one_call_of_flex_attention_in_each_layer(uncompiled: list[int]) -> None:
    model = model_of("gemma2")
    walked(model, mixed(), chunk=10_000)
    tokens = make_plan(mixed(), Limits(10**6, 10**6)).computed_tokens
    *whole, reads = uncompiled
    assert whole == [tokens] * (model.config.num_hidden_layers - 1)
    assert reads < tokens, "the last layer attends from the prompts' last tokens alone"


@st.composite
def forests(draw: st.DrawFn) -> Pack:
    """A pack of random trees, some behind held nodes."""
    parents = [-1, *(draw(st.integers(-1, node - 1)) for node in range(1, draw(st.integers(1, 9))))]
    order: list[int] = []

    def visit(node: int) -> None:
        order.append(node)
        for child in range(len(parents)):
            if parents[child] == node:
                visit(child)

    for node, parent in enumerate(parents):
        if parent < 0:
            visit(node)
    parents = [order.index(parents[node]) if parents[node] >= 0 else -1 for node in order]
    held = tuple(
        Held(("pack", number), 0, start, length) for number, (start, length) in enumerate(((0, 20), (20, 140)))
    )
    lengths = [draw(st.sampled_from((1, 2, 30, 127, 128, 300))) for _ in order]
    attach, starts = [], []
    seen = len(held)  # less and less, as in a plan: neighbours share held nodes
    for parent in parents:
        if parent < 0:
            seen = draw(st.integers(0, seen))
        attach.append(tuple(range(seen)) if parent < 0 else ())
        starts.append(sum(each.length for each in held[:seen]) if parent < 0 else starts[parent] + lengths[parent])
    offsets = [0, *np.cumsum(lengths).tolist()]
    numbers = np.arange(offsets[-1], dtype=np.int32)
    return Pack(0, numbers, numbers, offsets, starts, parents, attach, [], held)


def seen_by(tree: Tree, token: int, depth: int, window: KeyWindow | None) -> set[int]:
    """The keys that a token sees, one by one."""
    node = next(n for n in range(len(tree.parents)) if tree.offsets[n] <= token < tree.offsets[n + 1])
    keys = [key for start, end in tree.path(node) for key in range(start, end) if key <= tree.held + token]
    oldest = window.oldest(depth) if window else 0
    return {key for number, key in enumerate(keys) if number >= oldest}


@given(pack=forests(), window=st.sampled_from(WINDOWS), data=st.data())
@settings(max_examples=60, deadline=None)
def test_masks_show_each_query_its_path(pack: Pack, window: KeyWindow | None, data: st.DataObject) -> None:
    tree, count = Tree(pack), len(pack.tokens)
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    few = data.draw(st.sets(st.integers(start, end - 1), min_size=1, max_size=5))
    for tokens in (np.arange(start, end), np.array(sorted(few))):
        mask = forest_mask(tree, tokens, tree.depths[tokens], window, CPU)
        assert mask is not None
        shown = as_matrix(mask, len(tokens))
        for at in {0, len(tokens) // 2, len(tokens) - 1}:
            token = int(tokens[at])
            wanted = seen_by(tree, token, int(tree.depths[token]), window)
            assert set(np.flatnonzero(shown[at])) == wanted


def as_matrix(mask: ForestMask, queries: int) -> np.ndarray:
    """What each query sees, bool [queries, keys]: whole blocks, and what the mask shows of partial ones."""
    blocks = mask.blocks
    shown = np.zeros((queries, mask.keys), bool)
    query, key = torch.arange(queries)[:, None], torch.arange(mask.keys)[None]
    inside = blocks.mask_mod(None, None, query, key).numpy()
    for row in range(-(-queries // BLOCK)):
        at = slice(row * BLOCK, (row + 1) * BLOCK)
        for count, which, is_whole in (
            (blocks.kv_num_blocks, blocks.kv_indices, False),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices, True),
        ):
            for column in which[0, 0, row, : count[0, 0, row]].tolist():
                keys = slice(column * BLOCK, (column + 1) * BLOCK)
                assert not is_whole or keys.stop <= mask.keys
                shown[at, keys] = True if is_whole else inside[at, keys]
    return shown


def test_held_nodes_that_are_seen_here_and_there_have_no_mask() -> None:
    numbers = np.arange(3, dtype=np.int32)
    pack = Pack(
        0, numbers, numbers, [0, 1, 2, 3], [9, 0, 9], [-1] * 3, [(0,), (), (0,)], [], (Held(("a", 0), 0, 0, 9),)
    )
    assert forest_mask(Tree(pack), numbers.astype(np.int64), Tree(pack).depths, None, CPU) is None


def test_only_blocks_that_something_is_seen_of_are_computed() -> None:
    rows, length = 40, 150
    numbers = np.arange(rows * length, dtype=np.int32)
    offsets = list(range(0, rows * length + 1, length))
    pack = Pack(0, numbers, numbers, offsets, [0] * rows, [-1] * rows, [()] * rows, [])
    mask = forest_mask(Tree(pack), numbers.astype(np.int64), Tree(pack).depths, None, CPU)
    assert mask is not None
    computed = int(mask.blocks.kv_num_blocks.sum() + mask.blocks.full_kv_num_blocks.sum())
    assert computed <= 3 * -(-rows * length // BLOCK)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_the_check_of_paths_agrees_and_finds_another_log_sum_exp(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = replace(attention_checks._WAYS["flex"], lacks=lambda device, dtype: None)
    monkeypatch.setitem(attention_checks._WAYS, "flex", way)
    monkeypatch.setattr(cuda_kernels, "compiled_flex", lambda: flex_attention)
    assert check_path("flex", CPU, dtype).status == "agrees"

    def in_powers_of_two(*args: object, **kwargs: object) -> object:
        out, aux = flex_attention(*args, **kwargs)
        return out, aux._replace(lse=aux.lse / np.log(2))

    monkeypatch.setattr(cuda_kernels, "compiled_flex", lambda: in_powers_of_two)
    assert check_path("flex", CPU, dtype).status == "differs"


def test_flex_attention_is_for_what_flash_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "_lacks_compiler", lambda: None)
    monkeypatch.setattr(attention, "compute_capability", lambda device: (9, 0))
    with FakeTensorMode():
        plain, wide = (torch.empty(1, 2, 3, width, device="cuda", dtype=torch.bfloat16) for width in (64, 512))
        assert not cuda_kernels.takes_flex(plain, plain, None)
        assert cuda_kernels.takes_flex(plain, plain, 50.0)
        assert cuda_kernels.takes_flex(wide, wide, None)
        assert not cuda_kernels.takes_flex(plain.float(), plain.float(), 50.0)
        monkeypatch.setattr(attention, "compute_capability", lambda device: (7, 5))
        assert cuda_kernels.takes_flex(plain, plain, None)
    assert not cuda_kernels.takes_flex(torch.empty(1, 2, 3, 64, dtype=torch.bfloat16), torch.empty(1, 2, 3, 64), 50.0)
    monkeypatch.setattr(cuda_kernels, "_lacks_compiler", lambda: "no Triton")
    with FakeTensorMode():
        assert not cuda_kernels.takes_flex(
            *(torch.empty(1, 2, 3, 64, device="cuda", dtype=torch.bfloat16) for _ in "qv"), 50.0
        )


@pytest.mark.nightly
def test_one_graph_is_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on CUDA, with the backend that generates no code."""
    monkeypatch.setattr(
        cuda_kernels, "compiled_flex", lambda: torch.compile(flex_attention, dynamic=True, backend="aot_eager")
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    generator, graphs = torch.Generator().manual_seed(0), []
    for lengths in ((300, 130, 20), (64, 700, 1), (129, 257, 40), (80, 81, 82)):
        offsets = [0, *np.cumsum(lengths).tolist()]
        numbers = np.arange(offsets[-1], dtype=np.int32)
        tree = Tree(Pack(0, numbers, numbers, offsets, [0, lengths[0], lengths[0]], [-1, 0, 0], [()] * 3, []))
        at = np.arange(lengths[0] // 2, offsets[-1])
        mask = forest_mask(tree, at, tree.depths[at], KeyWindow(100), CPU)
        assert mask is not None
        query = torch.randn(1, 4, len(at), 64, generator=generator)
        key, value = (torch.randn(1, 2, offsets[-1], 64, generator=generator) for _ in range(2))
        shown = torch.as_tensor(as_matrix(mask, len(at)))[None, None]
        for softcap in (None, 9.0):
            found = attend_by_flex(query, key, value, mask, scale=0.3, softcap=softcap)
            wanted = attend_blockwise(query, key, value, scale=0.3, softcap=softcap, visible=shown)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1] <= 4, "later shapes compile nothing"
