"""The compiled kernel attends as explicit scores do, and is used only where it can be trusted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefillcli.plan.pack import Held, Limits, Pack
from prefillcli.runtime import user_cache
from prefillcli.walk import attention, attention_checks, forest
from prefillcli.walk.forest import register
from prefillcli.walk.layout import Chunk, KeyWindow, Tree
from tests.unit.walk.families import FAMILIES, each_family, make_model
from tests.unit.walk.test_flex import forests, seen_by
from tests.unit.walk.test_walk import eager, mixed, p_yes, walked

needs_kernel = pytest.mark.skipif(
    attention.forest_kernel() is None, reason="needs AVX2, GNU's OpenMP and a C++ compiler"
)
CPU = torch.device("cpu")
SOURCE = 'extern "C" int answer() { return ANSWER; }'


@pytest.mark.sampled(1)
@needs_kernel
@each_family
def test_a_forest_in_bfloat16_is_as_near_the_eager_forward_as_without_the_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over packs that hold prefixes, windows, sinks and soft caps; the reference is float32 over the same weights.

    All experts are chosen, so that no last bit sends a token to others: one that does outweighs all rounding. What the
    kernel rounds is its output alone, so the ratio is near 1: of Llama and Qwen3 0.98 and 1.05 over 20 draws of
    prompts, but once 1.30 over three.
    """
    register()
    own = FAMILIES[family]
    experts = own.get("num_experts", own.get("num_local_experts"))
    sizes = {} if experts is None else {"num_experts_per_tok": experts}
    half, exact = make_model(family, torch.bfloat16, **sizes), make_model(family, **sizes)
    exact.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    limits = Limits(110, 10**6, held_tokens=10**6)
    prompts = [prompt for draw in range(4, 10) for prompt in mixed(draw)]
    wanted = p_yes(eager(exact, prompts))
    used = []
    attend = attention.ForestKernel.attend

    def noted(self: attention.ForestKernel, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        used.append(options["window"])
        return attend(self, *args, **options)

    monkeypatch.setattr(attention.ForestKernel, "attend", noted)
    with_kernel = (p_yes(walked(half, prompts, chunk=97, limits=limits)) - wanted).abs()
    monkeypatch.setattr(forest, "forest_kernel", lambda: None)
    without = (p_yes(walked(half, prompts, chunk=97, limits=limits)) - wanted).abs()
    assert used
    assert with_kernel.mean() <= 1.3 * without.mean()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "tokens", "window", "softcap"),
    [
        (1, 1, (16, 16), 1, None, None),
        (5, 1, (48, 48), 30, 3, None),
        (16, 2, (64, 64), 130, 64, None),
        (64, 1, (32, 32), 7, None, 2.0),
        (2, 2, (256, 256), 200, 150, None),
        (4, 4, (192, 128), 90, None, 30.0),
        (4, 2, (64, 96), 90, 20, None),
    ],
)
def test_any_shape_agrees_with_explicit_scores(
    heads: int,
    kv_heads: int,
    widths: tuple[int, int],
    tokens: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = attention_checks.AttentionCase("", heads, kv_heads, widths, tokens, window=window, softcap=softcap)
    monkeypatch.setattr(attention_checks, "CASES", [case])
    assert attention_checks.check_path("kernel", CPU, dtype).status == "agrees"


def bush(nodes: Sequence[tuple[int, int, tuple[int, ...]]]) -> Pack:
    """A pack of nodes with these lengths, parents, and held nodes of 150 tokens before them."""
    starts: list[int] = []
    for _, parent, seen in nodes:
        starts.append(150 * len(seen) if parent < 0 else starts[parent] + nodes[parent][0])
    lengths, parents, attach = zip(*nodes, strict=True)
    offsets = [0, *np.cumsum(lengths).tolist()]
    numbers = np.arange(offsets[-1], dtype=np.int32)
    held = tuple(Held(("pack", number), 0, 0, 150) for number in range(2))
    return Pack(0, numbers, numbers, offsets, starts, list(parents), list(attach), [], held)


@st.composite
def bushes(draw: st.DrawFn) -> Pack:
    """Short nodes behind long ones, some of which are held."""
    nodes: list[tuple[int, int, tuple[int, ...]]] = []
    for node in range(draw(st.integers(2, 12))):
        above = [node - 1] if nodes else []
        while above and nodes[above[-1]][1] >= 0:
            above.append(nodes[above[-1]][1])
        parent = draw(st.sampled_from([-1, *above]))
        seen = draw(st.sampled_from(((), (0,), (1,)))) if parent < 0 else ()
        long = parent < 0 and not seen
        nodes.append((draw(st.sampled_from((100, 145, 300) if long else (1, 2, 5, 13, 60))), parent, seen))
    return bush(nodes)


# The fourth node behind the root sees few keys of the path before it; the one behind it sees more of its own.
CHILDREN = bush([(145, -1, ()), (60, 0, ()), (1, 1, ()), (1, 1, ()), (48, 0, ()), (1, 4, ())])


@needs_kernel
@given(
    pack=forests() | bushes(),
    window=st.sampled_from(
        (None, KeyWindow(7), KeyWindow(150), KeyWindow(9, aligned=True), KeyWindow(70, aligned=True))
    ),
    heads=st.sampled_from(((1, 1), (9, 3), (8, 1))),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    part=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    threads=st.sampled_from((1, 3)),
)
@settings(max_examples=80, deadline=None)
@example(CHILDREN, None, (1, 1), torch.float32, (0, 1), 1)
def test_nodes_that_are_computed_together_get_the_bits_of_one_alone(
    pack: Pack,
    window: KeyWindow | None,
    heads: tuple[int, int],
    dtype: torch.dtype,
    part: tuple[float, float],
    threads: int,
) -> None:
    """Explicit scores in float64 are the reference. Another node's numbers, even if they are none, change nothing.

    One thread takes more of them together than several.
    """
    tree, count = Tree(pack), len(pack.tokens)
    start, end = (round(each * (count - 1)) for each in sorted(part))
    chunk = Chunk(tree, start, end + 1, CPU, batched=1)
    kernel, scoring = attention.compiled_kernel(), forest.Scoring(0.25, None, window)
    generator = torch.Generator().manual_seed(count)
    query = torch.randn(1, heads[0], end + 1 - start, 32, generator=generator).to(dtype)
    key, value = (torch.randn(1, heads[1], tree.held + count, 32, generator=generator).to(dtype) for _ in "kv")
    with patch.object(torch, "get_num_threads", lambda: threads):
        out, lse = forest.attend_by_kernel(kernel, chunk, query, key, value, scoring)
    alone = chunk.blocks(window, 1)
    assert not alone[0][:, 5].any()
    sliding = None if window is None or window.aligned else window.size
    bits = kernel.attend(query, key, value, *alone, scale=0.25, window=sliding)
    assert torch.equal(out, bits[0])
    assert torch.equal(lse, bits[1])

    at = (end - start) * 2 // 3
    seen = sorted(seen_by(tree, start + at, int(tree.depths[start + at]), window))
    node = bisect_right(tree.offsets, start + at) - 1
    path = {place for first, end in tree.path(node) for place in range(first, end)}
    for states in (key, value):
        states[:, :, sorted(set(range(key.shape[2])) - path)] = torch.nan
    with patch.object(torch, "get_num_threads", lambda: threads):
        out, lse = forest.attend_by_kernel(kernel, chunk, query, key, value, scoring)
    assert torch.equal(out[:, :, at], bits[0][:, :, at])
    groups = heads[0] // heads[1]
    keys, values = (states[0][:, seen].double().repeat_interleave(groups, dim=0) for states in (key, value))
    scores = torch.einsum("hd,hkd->hk", query[0, :, at].double(), keys) * 0.25
    expected = torch.einsum("hk,hkd->hd", scores.softmax(dim=1), values)
    assert (out[0, :, at].double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
    assert (lse[0, :, at].double() - scores.logsumexp(dim=1)).abs().max() < 1e-4


@needs_kernel
def test_a_soft_cap_keeps_small_scores_as_exact_as_large_ones() -> None:
    """Differences of scores are read off the log-sum-exps of single keys."""
    size = torch.logspace(-4, 3, 400).repeat_interleave(16).view(1, 1, 400, 16) / 4
    key = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16).contiguous()
    for at in range(2):
        blocks = np.array([[query, 1, 5, query, query + 1, 0] for query in range(400)], np.int64)
        runs = np.array([[at, at + 1, 5]] * 400, np.int64)
        found = attention.compiled_kernel().attend(
            size, key, key, blocks, runs, scale=0.25, softcap=50.0, window=None
        )[1][0, 0].double()  # fmt: skip
        expected = 50.0 * torch.tanh((size.double() @ key[:, :, at : at + 1].double().mT).squeeze() * 0.25 / 50.0)
        assert ((found - expected) / expected).abs().max() < 1e-6


def test_short_nodes_behind_one_fill_blocks_together() -> None:
    """Ten questions of 12 tokens behind a document are 6 blocks of 21 queries, not 10."""
    pack = bush([(2000, -1, ()), *[(12, 0, ())] * 10])
    blocks, _ = Chunk(Tree(pack), 2000, 2120, CPU, batched=1).blocks(None, 21)
    begun = blocks[:, 5] == 0
    assert begun.sum() == 6
    assert blocks[:, 1].sum() == 120
    assert np.add.reduceat(blocks[:, 1], np.flatnonzero(begun)).max() == 21


def test_other_shapes_and_dtypes_are_left_to_others() -> None:
    query = torch.zeros(1, 4, 9, 64, dtype=torch.bfloat16)
    assert attention.takes(query, query, 2)
    assert attention.takes(query.float(), query.float(), 2)
    assert not attention.takes(query.half(), query.half(), 2)
    assert not attention.takes(query[..., :40], query[..., :40], 2)
    assert not attention.takes(query.transpose(2, 3), query, 2)
    assert not attention.takes(torch.zeros(1, 2, 9, 512, dtype=torch.bfloat16), query, 2)
    assert not attention.takes(torch.zeros(1, 65, 9, 64, dtype=torch.bfloat16), query, 1)


@needs_kernel
def test_a_kernel_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = resources.files("prefillcli.walk").joinpath("forest_attention.cpp").read_text()
    (tmp_path / "wrong_kernel").mkdir()
    (tmp_path / "wrong_kernel" / "wrong.cpp").write_text(
        text.replace("{ return score * by.scale; }", "{ return score; }")
    )
    monkeypatch.syspath_prepend(tmp_path)
    wrong = attention.compiled_library("wrong.cpp", "wrong_kernel")
    monkeypatch.setattr(attention, "compiled_library", lambda _: wrong)
    attention.compiled_kernel.cache_clear()
    try:
        assert attention_checks.check_path("kernel", CPU, torch.bfloat16).status == "differs"
    finally:
        attention.compiled_kernel.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A package with C++ to compile, and a cache of its own."""
    if user_cache._compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cpp_sources").mkdir()
    (tmp_path / "cpp_sources" / "source.cpp").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "cpp_sources", "source.cpp"


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "prefillcli" / "compiled").glob("*"))


def test_a_library_is_compiled_once_for_each_source_and_flags(
    source: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
    assert user_cache.load_compiled(*source, ["-DANSWER=43"]).answer() == 43
    kept = files(tmp_path)
    assert len(kept) == 2
    monkeypatch.setattr(user_cache, "_compile", lambda *_: pytest.fail("compiled again"))
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
    assert files(tmp_path) == kept


def test_without_a_compiler_or_with_one_that_fails_there_is_none(
    source: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_cache.load_compiled(*source, []) is None  # it does not compile
    for name in ("", "no-such-compiler", "false"):
        monkeypatch.setenv("CXX", name)
        assert user_cache.load_compiled(*source, ["-DANSWER=42"]) is None
    assert files(tmp_path) == []


def test_a_library_that_an_image_brings_needs_no_compiler(
    source: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache.compile_beside(*source, ["-DANSWER=42"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
    assert user_cache.load_compiled(*source, ["-DANSWER=43"]) is None
    (tmp_path / "cpp_sources" / "source.cpp").write_text(SOURCE + "// changed")
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]) is None
    assert files(tmp_path) == []


@pytest.mark.nightly
@needs_kernel
def test_the_libraries_for_all_processors_have_this_one(tmp_path: Path) -> None:
    shutil.copytree(Path(attention.__file__).parents[1], tmp_path / "prefillcli")
    code = """
import torch
from prefillcli.walk import attention
attention.compile_for_all_processors()
assert attention.compiled_kernel().form
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for program in (code, code.replace("attention.compile_for_all_processors()", "")):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
        environment["CXX"] = "no-such-compiler"


def test_what_others_may_have_written_is_not_loaded(source: tuple[str, str], tmp_path: Path) -> None:
    user_cache.load_compiled(*source, ["-DANSWER=42"])
    (library,) = files(tmp_path)
    library.write_bytes(b"not a library")
    os.chmod(library, 0o777)  # noqa: S103 - that is the point
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
    os.chmod(library.parent, 0o777)  # noqa: S103
    assert user_cache._kept(library.name) is None


def test_a_damaged_library_is_compiled_again(source: tuple[str, str], tmp_path: Path) -> None:
    user_cache.load_compiled(*source, ["-DANSWER=42"])
    (library,) = files(tmp_path)
    data = library.read_bytes()
    library.unlink()
    library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.chmod(library, 0o700)
    assert user_cache._kept(library.name) is None
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
    assert library.read_bytes() == data


def test_a_cache_that_cannot_be_written_costs_a_compilation(
    source: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert user_cache.load_compiled(*source, ["-DANSWER=42"]).answer() == 42
