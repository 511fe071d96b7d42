"""Attention by path: a token's output has the same bits in every pack, order, chunk and number of threads.

Queries, keys and values are drawn for each path of tokens, so that the forest's layout is all that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk import attention
from prefillcli.walk import determinism as by_path
from prefillcli.walk.determinism import attend_by_path
from prefillcli.walk.forest import ForestAttention
from prefillcli.walk.layout import Chunk, LastTokens, Tree, split_evenly
from tests.unit.walk.test_walk import Prompt, tokens

CPU = torch.device("cpu")
WAYS = ("kernel", "operators")
WHOLE = Limits(10**6, 10**6)
HOLDING = Limits(160, 10**6, held_tokens=10**6)
Path = bytes


@dataclass
class Layer:
    """What a layer hands to attention: its shapes, and a row [heads, width] of each for every path of tokens."""

    heads: int = 4
    kv_heads: int = 2
    widths: tuple[int, int] = (32, 32)
    softcap: float | None = None
    window: int | None = None
    aligned: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    rows: dict[Path, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def row(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        if path not in self.rows:
            generator = torch.Generator().manual_seed(int.from_bytes(path[-4:], "little") * 7919 + len(path))
            shapes = (self.heads, self.widths[0]), (self.kv_heads, self.widths[0]), (self.kv_heads, self.widths[1])
            drawn = [torch.randn(shape, generator=generator) for shape in shapes]
            self.rows[path] = tuple((each * 3 if at < 2 else each).to(self.dtype) for at, each in enumerate(drawn))
        return self.rows[path]

    def of(self, paths: list[Path]) -> list[Tensor]:
        """[1, heads, tokens, width] each."""
        return [torch.stack(each, dim=1)[None] for each in zip(*map(self.row, paths), strict=True)]

    def module(self) -> nn.Module:
        module = nn.Module()
        module.layer_idx = 0
        if self.aligned:
            module.config = type("Config", (), {"layer_types": ["chunked_attention"], "attention_chunk_size": 40})()
        return module


LAYERS = {
    "plain": Layer(),
    "bfloat16": Layer(dtype=torch.bfloat16),
    "one K,V head": Layer(heads=7, kv_heads=1, widths=(64, 64)),
    "sliding window": Layer(window=37),
    "sliding window, bfloat16": Layer(window=110, dtype=torch.bfloat16),
    "aligned window": Layer(aligned=True),
    "soft cap": Layer(softcap=5.0, window=60),
    "narrow values": Layer(widths=(48, 16), kv_heads=4),
    "sinks": Layer(sinks=True, dtype=torch.bfloat16),
}


def prompts() -> list[Prompt]:
    """Branches at depths that are multiples of nothing, prompts that end where others go on, and a duplicate."""
    rng = np.random.default_rng(3)
    user, other = tokens(rng, 103), tokens(rng, 47)
    made = [np.concatenate([user, tokens(rng, n)]) for n in (1, 31, 90)]
    deeper = np.concatenate([made[2][:170], tokens(rng, 20)])
    return [*made, user.copy(), deeper, np.concatenate([other, tokens(rng, 20)]), other, tokens(rng, 5), deeper.copy()]


def attended(layer: Layer, given: list[Prompt], limits: Limits, chunk_tokens: int) -> dict[tuple[str, Path], Tensor]:
    """The output [heads, width] for every path in every pack of a plan, and for the last tokens by themselves."""
    found: dict[tuple[str, Path], Tensor] = {}
    module, sinks = layer.module(), torch.linspace(-1, 1, layer.heads) if layer.sinks else None
    how = {"scaling": 0.2, "softcap": layer.softcap, "sliding_window": layer.window, "s_aux": sinks}
    held_nodes: dict[object, list[Path]] = {}

    def take(kind: str, paths: list[Path], out: Tensor) -> None:
        for path, row in zip(paths, out[0], strict=True):
            known = found.setdefault((kind, path), row.clone())
            assert torch.equal(known, row), "two packs of a plan differ"

    for pack in make_plan(given, limits).packs:
        tree = Tree(pack)
        above = [b"".join(part) for part in _paths_above(pack, held_nodes)]
        nodes = [pack.tokens[start:end] for start, end in zip(pack.offsets, pack.offsets[1:], strict=False)]
        paths: list[Path] = []
        ends: list[Path] = []
        for number, own in enumerate(nodes):
            before = above[number] if pack.parents[number] < 0 else ends[pack.parents[number]]
            each = [before + own[: at + 1].astype("<i4").tobytes() for at in range(len(own))]
            paths += each
            ends.append(each[-1])
        for number, key in pack.kept_nodes.items():
            held_nodes[key] = paths[pack.offsets[number] : pack.offsets[number + 1]]
        with ForestAttention(pack.held_tokens + len(paths), attend=attend_by_path) as attention:
            held = [layer.of(held_nodes[node.key][node.offset : node.offset + node.length]) for node in pack.held]
            attention.start_layer([(key, value) for _, key, value in held])
            for start, end in split_evenly(len(paths), chunk_tokens):
                attention.chunk(Chunk(tree, start, end, CPU, 64))
                take("chunk", paths[start:end], attention(module, *layer.of(paths[start:end]), None, **how))
            reads = [node for node, _ in pack.reads]
            attention.last_tokens(
                LastTokens(tree, np.array([pack.offsets[node + 1] - 1 for node in reads], np.int64), CPU)
            )
            last = [ends[node] for node in reads]
            take("last token", last, attention(module, *layer.of(last), None, **how))
    return found


def _paths_above(pack: object, held_nodes: dict[object, list[Path]]) -> Iterator[list[bytes]]:
    for seen in pack.attach:
        yield [held_nodes[pack.held[seen[-1]].key][-1]] if seen else []


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute it, the kernel where it is there."""
    if request.param == "operators":
        monkeypatch.setattr(by_path, "forest_kernel", lambda: None)
        monkeypatch.setattr(by_path, "QUERIES", 8)
        monkeypatch.setattr(by_path, "KEYS", 32)
    elif attention.forest_kernel() is None:
        pytest.skip("needs AVX2, GNU's OpenMP and a C++ compiler")
    return str(request.param)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_bits_do_not_depend_on_pack_chunk_order_or_threads(name: str, way: str) -> None:
    layer, given = LAYERS[name], prompts()
    wanted = attended(layer, given, WHOLE, 10**6)
    assert any(kind == "last token" for kind, _ in wanted)
    found = [attended(layer, given[::-1], HOLDING, 53)]
    with threads(2):
        found.append(attended(layer, given[2:6], WHOLE, 41))
    alone = [attended(layer, [prompt], WHOLE, 100) for prompt in given[1:5:2]]
    for each in [*found, *alone]:
        assert each
        assert [path for path, row in each.items() if not torch.equal(row, wanted[path])] == []


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_those_of_explicit_scores(name: str, way: str) -> None:
    layer = LAYERS[name]
    tolerance = 2e-5 if layer.dtype == torch.float32 else 3e-2
    found = attended(layer, prompts(), HOLDING, 53)
    for (_, path), row in list(found.items())[::7]:
        depth = len(path) // 4 - 1
        oldest = max(0, depth - layer.window + 1) if layer.window else depth // 40 * 40 if layer.aligned else 0
        _, key, value = (x[0].double() for x in layer.of([path[: 4 * at] for at in range(oldest + 1, depth + 2)]))
        query = layer.row(path)[0].double()
        groups = layer.heads // layer.kv_heads
        scores = torch.einsum("hd,hkd->hk", query, key.repeat_interleave(groups, 0)) * 0.2
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.sinks:
            scores = torch.cat([scores, torch.linspace(-1, 1, layer.heads).double()[:, None]], dim=1)
        shares = scores.softmax(dim=-1)[:, : key.shape[1]]
        exact = torch.einsum("hk,hkd->hd", shares, value.repeat_interleave(groups, 0))
        torch.testing.assert_close(row.double(), exact, atol=tolerance, rtol=tolerance)


def test_the_walk_takes_no_other_way_where_paths_alone_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel is ruled out the operators take its place, not what other packs take."""
    attention.rule_out("kernel", CPU, "for this test")
    try:
        layer, given = Layer(dtype=torch.bfloat16), prompts()
        wanted = attended(layer, given, WHOLE, 10**6)
        found = attended(layer, given[::-1], HOLDING, 53)
    finally:
        attention.allow_all()
    assert all(torch.equal(row, wanted[path]) for path, row in found.items())
