"""Each path of attention against explicit scores in float64, with the tensors on the device that will compute.

The cases are those of a walk: a node's own tokens, and two ancestors that are merged by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from prefillcli.errors import brief
from prefillcli.plan.pack import Pack
from prefillcli.walk.attention import (
    KERNEL,
    LANES,
    PATHS,
    Shift,
    attend,
    attend_blockwise,
    attend_by_products,
    compiled_kernel,
    compute_capability,
    has_bfloat16_instructions,
    has_kernel_instructions,
    merge_into,
    ruled_out,
    takes,
    why_no_library,
)
from prefillcli.walk.cuda_kernels import attend_by_flex, attend_sequences, lacks_flex, mask_of, sequence_tables
from prefillcli.walk.layout import Chunk, KeyWindow, Tree

GAP = 5  # keys between the ancestors and the tokens that nobody may see
FACTOR = 3.0  # of the error that eager attention has in the same dtype
#: The difference allowed above that, for outputs around 1 and for their log-sum-exp.
FLOORS = {torch.float32: (1e-5, 1e-4), torch.float16: (4e-3, 1e-2), torch.bfloat16: (3e-2, 3e-2)}
LARGE = 200.0

Attention = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Shapes of one comparison: `ancestors` are the numbers of keys of two nodes before the `tokens`.

    `widths` are those of keys and of values. Scores are `around` a number, and spread over `spread` times a normal
    distribution.
    """

    name: str
    heads: int = 4
    kv_heads: int = 4
    widths: tuple[int, int] = (64, 64)
    tokens: int = 70
    ancestors: tuple[int, int] = (40, 17)
    window: int | None = None
    softcap: float | None = None
    spread: float = 1.0
    around: float = 0.0

    @property
    def large(self) -> bool:
        """Return whether scores are so large that products in half precision round them by whole units."""
        return max(self.spread, self.around) > 50


CASES = (
    AttentionCase("heads of 64"),
    AttentionCase("grouped queries, heads of 32", heads=6, kv_heads=2, widths=(32, 32)),
    AttentionCase("one K,V head, heads of 128", heads=8, kv_heads=1, widths=(128, 128), tokens=9),
    AttentionCase("heads of 256", heads=2, kv_heads=1, widths=(256, 256), tokens=33),
    AttentionCase("heads of 80", heads=3, kv_heads=3, widths=(80, 80), tokens=50),
    AttentionCase("narrow values", heads=2, kv_heads=2, widths=(96, 64), tokens=40),
    AttentionCase("one token", heads=4, kv_heads=2, tokens=1),
    AttentionCase("long", heads=2, kv_heads=1, tokens=520, ancestors=(1100, 300)),
    AttentionCase("window", heads=3, kv_heads=3, tokens=50, window=17),
    AttentionCase("window in an ancestor", heads=4, kv_heads=2, tokens=60, window=75),
    AttentionCase("soft cap", heads=4, kv_heads=2, softcap=20.0, spread=8.0),
    AttentionCase("scores up to 200", heads=4, kv_heads=2, spread=LARGE / 3.5),
    AttentionCase("scores around 200", heads=4, kv_heads=2, around=LARGE),
)


class AttentionTrial(NamedTuple):
    """The tensors of a case: `query` [1, heads, tokens, width], `key` and `value` [1, kv heads, keys, width].

    `runs` are the keys of each node with the depth of its first; between the ancestors and the tokens are `GAP` keys
    that belong to none.
    """

    case: AttentionCase
    query: Tensor
    key: Tensor
    value: Tensor
    runs: tuple[tuple[int, int, int], ...]
    scale: float

    def to(self, device: torch.device) -> AttentionTrial:
        return self._replace(query=self.query.to(device), key=self.key.to(device), value=self.value.to(device))


class Difference(NamedTuple):
    """The distance of attention from explicit scores: outputs, log-sum-exps, and the larger of the two as a share of
    the allowed difference."""

    out: float
    lse: float
    share: float


@dataclass(frozen=True, slots=True)
class PathCheck:
    """The outcome of a path in a dtype. `error` is the largest of its outputs for usual scores, `large_error` for
    those near 200, `lse_error` the largest of its log-sum-exps; None also where some are no numbers."""

    path: str
    dtype: str
    status: Literal["agrees", "differs", "fails", "not here"]
    why: str | None = None
    error: float | None = None
    large_error: float | None = None
    lse_error: float | None = None


def lacks(path: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a device lacks a path in a dtype; None if it has it. Raises KeyError for an unknown path."""
    return _WAYS[path].lacks(device, dtype)


def check_path(path: str, device: torch.device, dtype: torch.dtype, width: int | None = None) -> PathCheck:
    """Compare a path with explicit scores in all cases that it takes. Raises KeyError for an unknown path.

    With a `width`, all heads are as wide. A path that is already ruled out counts as different, for the reason given
    then.
    """
    name = str(dtype).removeprefix("torch.")
    missing = lacks(path, device, dtype)
    if missing is not None:
        return PathCheck(path, name, "not here", missing)
    known = ruled_out(device).get(path)
    if known is not None:
        return PathCheck(path, name, "differs", known)
    errors = []
    for case in CASES:
        if width is not None:
            case = replace(case, name=f"{case.name}, all of {width}", widths=(width, width))
        trial = make_trial(case, dtype)
        if not _WAYS[path].suits(trial):
            continue
        try:
            found = _WAYS[path].attend(trial.to(device))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an operator may raise anything on a device that it does not know
            return PathCheck(path, name, "fails", f"{case.name}: {type(error).__name__}: {brief(error)}")
        errors.append((difference_of(found, trial), case))
    worst, case = max(errors, key=lambda pair: pair[0].share)
    largest = (
        max(each.out for each, case in errors if not case.large),
        max((each.out for each, case in errors if case.large), default=None),
        max(each.lse for each, _ in errors),
    )
    told = [each if each is not None and math.isfinite(each) else None for each in largest]
    if worst.share <= 1.0:
        return PathCheck(path, name, "agrees", None, *told)
    why = f"{case.name}: outputs differ by {worst.out:.2g}, log-sum-exps by {worst.lse:.2g}"
    return PathCheck(path, name, "differs", why, *told)


def longest_trial(path: str, device: torch.device, dtype: torch.dtype) -> Callable[[], Attention]:
    """The attention of a path over the case with the most keys that it takes, to look at its kernels. Raises KeyError
    for an unknown path."""
    trials = [trial for trial in (make_trial(case, dtype) for case in CASES) if _WAYS[path].suits(trial)]
    return partial(_WAYS[path].attend, max(trials, key=lambda trial: trial.key.shape[2]).to(device))


def eager_errors(dtype: torch.dtype) -> tuple[float, float]:
    """The largest error of outputs that eager attention has, for comparison: for usual scores, and near 200."""
    found = [(_explicit(case, dtype), case.large) for case in CASES]
    errors = [(_largest(usual[0].double() - exact[0]), large) for (exact, usual), large in found]
    return max(error for error, large in errors if not large), max(error for error, large in errors if large)


def check_paths(
    paths: Iterable[str], device: torch.device, dtype: torch.dtype, width: int | None = None
) -> list[PathCheck]:
    """`check_path` of several; nothing stays in memory."""
    try:
        return [check_path(path, device, dtype, width) for path in paths]
    finally:
        make_trial.cache_clear()
        _explicit.cache_clear()


@cache
def make_trial(case: AttentionCase, dtype: torch.dtype) -> AttentionTrial:
    """The tensors of a case on the CPU, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    before = sum(case.ancestors)
    keys = before + GAP + case.tokens
    width, narrow = case.widths

    def drawn(heads: int, length: int, wide: int) -> Tensor:
        return torch.randn(1, heads, length, wide, generator=generator)

    query, key = drawn(case.heads, case.tokens, width), drawn(case.kv_heads, keys, width)
    scale = width**-0.5
    query.mul_(case.spread)
    if case.around:  # each query's product with a part that all keys have
        direction = torch.full((width,), width**-0.5)
        query.add_(direction * (case.around / scale) ** 0.5)
        key.add_(direction * (case.around / scale) ** 0.5)
    value = drawn(case.kv_heads, keys, narrow)
    first = case.ancestors[0]
    key[:, :, before : before + GAP] = 50.0
    runs = ((0, first, 0), (first, before, first), (before + GAP, keys, before))
    return AttentionTrial(case, query.to(dtype), key.to(dtype), value.to(dtype), runs, scale)


def difference_of(found: Attention, trial: AttentionTrial) -> Difference:
    """The difference between the attention of a trial, on any device, and explicit scores in float64 on the CPU."""
    wanted, eager = _explicit(trial.case, trial.query.dtype)
    floors, shares, errors = FLOORS[trial.query.dtype], [], []
    for each, exact, usual, floor in zip(found, wanted, eager, floors, strict=True):
        error = _largest(each.cpu().double() - exact)
        errors.append(error)
        shares.append(error / (FACTOR * _largest(usual.double() - exact) + floor))
    return Difference(errors[0], errors[1], max(shares))


def _largest(error: Tensor) -> float:
    return float(error.abs().nan_to_num(math.inf).max())


@cache
def _explicit(case: AttentionCase, dtype: torch.dtype) -> tuple[Attention, Attention]:
    # Attention with explicit scores: in float64, and as eager attention computes it in `dtype`.
    trial = make_trial(case, dtype)
    seen = torch.cat([torch.arange(start, end) for start, end, _ in trial.runs])
    at = torch.arange(case.tokens)[:, None] + sum(case.ancestors) - torch.arange(len(seen))[None, :]
    visible = (at >= 0) & (at < (case.window or len(seen)))
    groups = case.heads // case.kv_heads
    key, value = (x[:, :, seen].repeat_interleave(groups, dim=1) for x in (trial.key, trial.value))

    def computed(in_dtype: torch.dtype, softmax: torch.dtype) -> Attention:
        scores = trial.query.to(in_dtype) @ key.to(in_dtype).transpose(2, 3) * trial.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.to(softmax).masked_fill(~visible, -math.inf)
        return scores.softmax(dim=-1).to(in_dtype) @ value.to(in_dtype), scores.logsumexp(dim=-1)

    return computed(torch.float64, torch.float64), computed(dtype, torch.float32)


def _merged(trial: AttentionTrial, attend_part: Callable[..., Attention]) -> Attention:
    # Attention of a trial from that of its nodes. `attend_part(query, key, value, causal=, visible=)`.
    case, tokens = trial.case, trial.case.tokens
    depths = torch.arange(tokens, device=trial.query.device) + trial.runs[-1][2]
    parts: list[Attention] = []
    for start, end, depth in reversed(trial.runs):
        own = end == trial.key.shape[2]
        visible = None
        ahead = depths[:, None] - torch.arange(depth, depth + end - start, device=depths.device)[None, :]
        if case.window is not None and bool((ahead >= case.window).any()):
            visible = ((ahead >= 0) & (ahead < case.window))[None, None]
        key, value = trial.key[:, :, start:end], trial.value[:, :, start:end]
        parts.append(attend_part(trial.query, key, value, causal=own and visible is None, visible=visible))
    out, lse = (each.clone() for each in parts[0])
    for part in parts[1:]:
        merge_into(out, lse, *part)
    return out, lse


def _by_attend(trial: AttentionTrial) -> Attention:
    return _merged(trial, partial(attend, scale=trial.scale))


def _by_blocks(trial: AttentionTrial) -> Attention:
    return _merged(trial, partial(attend_blockwise, scale=trial.scale, softcap=trial.case.softcap))


def _by_products(trial: AttentionTrial) -> Attention:
    shift = Shift.of(trial.key[:, :, trial.runs[-1][0] :], trial.scale)
    for start, end, _ in trial.runs:
        shift.include(key=trial.key[:, :, start:end])
    shift.include(query=trial.query)

    def part(query: Tensor, key: Tensor, value: Tensor, causal: bool, visible: Tensor | None) -> Attention:
        return attend_by_products(query, shift.moved(key), value, causal=causal, safe=shift.safe)

    out, lse = _merged(trial, part)
    return out, lse + shift.taken(trial.query)


def _by_kernel(trial: AttentionTrial) -> Attention:
    kernel = compiled_kernel()
    if kernel is None:
        raise ValueError("no kernel")
    query, key, value = trial.query, trial.key, trial.value
    case, depth = trial.case, trial.runs[-1][2]
    rows = LANES // (case.heads // case.kv_heads)
    starts = range(0, case.tokens, rows)
    blocks = [[at, min(rows, case.tokens - at), depth + at, 0, len(trial.runs), 0] for at in starts]
    return kernel.attend(
        query, key, value, np.array(blocks, np.int64), np.array(trial.runs, np.int64),
        scale=trial.scale, softcap=case.softcap, window=case.window,
    )  # fmt: skip


def _forest(trial: AttentionTrial) -> tuple[Chunk, KeyWindow | None]:
    # A pack of the ancestors, one below the other, and below them the gap and the tokens, which are computed.
    (_, first, _), (_, before, _), (start, end, _) = trial.runs
    numbers = np.arange(end, dtype=np.int32)
    offsets = [0, first, before, start, end]
    tree = Tree(Pack(0, numbers, numbers, offsets, [0, first, before, before], [-1, 0, 1, 1], [()] * 4, []))
    window = trial.case.window
    return Chunk(tree, start, end, trial.query.device, batched=1), KeyWindow(window) if window else None


def _by_sequences(trial: AttentionTrial) -> Attention:
    tables = sequence_tables(*_forest(trial))
    nothing = replace(tables[0], lengths=torch.zeros_like(tables[0].lengths), gaps=True)  # which must change nothing
    return attend_sequences([*tables, nothing], trial.query, trial.key, trial.value, trial.scale)


def _by_flex(trial: AttentionTrial) -> Attention:
    mask = mask_of(*_forest(trial))
    if mask is None:
        raise ValueError("no mask")
    return attend_by_flex(trial.query, trial.key, trial.value, mask, scale=trial.scale, softcap=trial.case.softcap)


@dataclass(frozen=True, slots=True)
class _Way:
    """The conditions under which a path is run: the reason why a device lacks it (None: it has it), the trials it
    takes, and its attention."""

    lacks: Callable[[torch.device, torch.dtype], str | None]
    suits: Callable[[AttentionTrial], bool]
    attend: Callable[[AttentionTrial], Attention]


def _lacks_cpu(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else "for CPUs"


def _lacks_products(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu" or dtype != torch.bfloat16:
        return "for bfloat16 on CPUs"
    return None if has_bfloat16_instructions() else "the processor has no instructions for bfloat16"


def _lacks_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return "for bfloat16 and float32 on CPUs"
    if not has_kernel_instructions():
        return "the processor has no AVX2"
    return None if compiled_kernel() is not None else (why_no_library(KERNEL) or "").partition("\n")[0]


def _lacks_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float32:
        return "for half precision on CUDA devices"
    major, minor = compute_capability(device)
    return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"


def _is_plain(trial: AttentionTrial) -> bool:
    # Without a soft cap or a window.
    return trial.case.softcap is None and trial.case.window is None


def _is_of_one_width(trial: AttentionTrial) -> bool:
    # Without a soft cap, and with values as wide as keys.
    return trial.case.softcap is None and trial.case.widths[0] == trial.case.widths[1]


_WAYS: dict[str, _Way] = {
    "blocks": _Way(lambda *_: None, lambda _: True, _by_blocks),
    "flash-cpu": _Way(_lacks_cpu, lambda trial: trial.case.softcap is None, _by_attend),
    "products": _Way(_lacks_products, _is_plain, _by_products),
    "kernel": _Way(
        _lacks_kernel,
        lambda trial: takes(trial.query, trial.value, trial.case.kv_heads),
        _by_kernel,
    ),
    "flash-cuda": _Way(_lacks_flash, _is_plain, _by_attend),
    "varlen-flash": _Way(_lacks_flash, _is_of_one_width, _by_sequences),
    "flex": _Way(lacks_flex, lambda _: True, _by_flex),
}

# The paths that can be checked, in the order of `PATHS`.
CHECKED = tuple(path for path in PATHS if path in _WAYS)
