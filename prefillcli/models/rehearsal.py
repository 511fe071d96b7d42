"""A rehearsal: the walk of a model compared with the model's own forward."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.errors import ResourceError, UsageError, brief
from prefillcli.models.find import ModelFiles
from prefillcli.models.multimodal import no_advice
from prefillcli.models.shape import VERIFIED, Shape, selects_keys
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime import device_key as devices
from prefillcli.runtime import log
from prefillcli.runtime.user_cache import KeptEntries
from prefillcli.walk.attention import PATHS, may_take, only_blocks, rule_out
from prefillcli.walk.attention_checks import CHECKED, PathCheck, check_paths
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError
from prefillcli.walk.layout import KeyWindow
from prefillcli.walk.model_ends import decoder_layers, embedding_device, last_row
from prefillcli.walk.own_cache import has_forest_attention, set_eager_attention, set_own_attention
from prefillcli.walk.walk import LayerSource, LayerWalk

# A model's forward in float32 whose weights are in half precision, without a second copy of them.


HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 inside the block: each module's own weights are converted while it is called.

    Afterwards, the weights are the tensors that they were. A module whose weights another one multiplies with raises
    torch's error about two dtypes.
    """
    with ExitStack() as hooks:
        for module in model.modules():
            if any(tensor.dtype in HALF for tensor in _own(module)):
                convert, restore = _conversion(module)
                hooks.callback(restore)
                hooks.callback(module.register_forward_pre_hook(convert).remove)
                hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _conversion(module: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
    converted: list[tuple[Tensor, Tensor]] = []

    def convert(*_: Any) -> None:
        for tensor in _own(module):
            if tensor.dtype in HALF:  # unless a module around this one shares the tensor, and has converted it
                converted.append((tensor, tensor.data))
                tensor.data = tensor.data.float()

    def restore(*_: Any) -> None:
        while converted:
            tensor, data = converted.pop()
            tensor.data = data

    return convert, restore


#: The error of a walk's logits in half precision that is allowed, as a multiple of that of the model's own forward.
HALF_PRECISION_FACTOR = 2.0
_REHEARSAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}

#: Settings of a configuration for the number of tokens after which a layer sees less than the whole prompt.
_REACHES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size", "index_topk")
LONGEST_REACH = 128  # the longest such number that a rehearsal's prompts pass; longer prompts would take long


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The way in which a walk of a model gives the logits of the model's own forward.

    With `own_cache` only the model's attention and cache do, because of the `reason`. Without `gaps` that holds for
    whole prompts alone, and not where tokens are left out.
    """

    own_cache: bool
    reason: str | None = None
    gaps: bool = True

    def set_attention(self, model: PreTrainedModel) -> None:
        """Set the model's attention to that of its walk."""
        if self.own_cache:
            set_own_attention(model)
        else:
            model.set_attn_implementation(ATTENTION)


FOREST = Rehearsal(own_cache=False)


def rehearse(
    model: PreTrainedModel,
    config: Any,
    layers: LayerSource | None = None,
    *,
    tolerance: float | None = None,
    strictly: bool = False,
) -> Rehearsal:
    """Walk a few prompts and compare their logits with the model's own eager forward; set the attention that fits.

    The forest attention is tried first, then the model's own attention and cache. Prompts share prefixes over two
    levels, spread over chunks and packs, pass short windows, and one has gaps in its positions. Raises
    UnsupportedModelError if they differ both ways: a score that is silently wrong is worse than none.

    The logits may differ by `tolerance` of the largest, or by the bound for its dtype. Where no `tolerance` is given,
    `strictly` also bounds errors in half precision by those of the model's own forward: both are compared with its
    forward in float32. That is for devices that the tests do not know.

    The weights of the model's layers come from `layers` where these are given. `rehearsal_of` finds the outcome again.
    """
    family, reasons = config.model_type, []
    prompts, kept = _prompts(config)
    try:
        set_eager_attention(model)
        wanted = _own_forward(model, prompts[:-1], kept[:-1], layers)
    except _ERRORS as error:
        raise UnsupportedModelError(f"{family} cannot be walked layer by layer: {_named(error)}") from error
    exact = None
    if strictly and tolerance is None and model.dtype != torch.float32:
        with suppress(*_ERRORS), in_float32(model):  # not every model computes in it
            exact = _own_forward(model, prompts[:-1], kept[:-1], layers)
    sparse: list[torch.Tensor] = []
    with suppress(*_ERRORS):  # some models cannot read a prompt with gaps themselves
        sparse = _own_forward(model, prompts[-1:], kept[-1:], layers)
    ways = [FOREST, Rehearsal(own_cache=True)]
    if selects_keys(config):  # short prompts may not show this
        ways, reasons = ways[1:], ["some of its layers see a selection of the tokens"]
    for way in ways:
        way.set_attention(model)
        if has_forest_attention(model) == way.own_cache:
            reasons.append("its attention is not called through the interface of transformers")
            continue
        try:
            _compare(model, config, prompts[:-1], kept[:-1], wanted, layers, tolerance, exact)
        except UnsupportedModelError as error:
            reasons.append(str(error))
        except torch.OutOfMemoryError:
            raise
        except _ERRORS as error:
            reasons.append(_named(error))
        else:
            gaps = bool(sparse) and _agree(model, config, prompts[-1:], kept[-1:], sparse, layers, tolerance)
            found = _rehearsals[model] = Rehearsal(way.own_cache, reasons[0] if reasons else None, gaps)
            return found
    both = reasons[0] if reasons[0] == reasons[1] else f"{reasons[0]}; with its own cache: {reasons[1]}"
    raise UnsupportedModelError(f"{family} cannot be walked layer by layer: {both}")


def rehearsal_of(model: PreTrainedModel) -> Rehearsal:
    """Return the rehearsal of a model; that of a verified model if there was none."""
    return _rehearsals.get(model, FOREST)


def check_uses(model: PreTrainedModel, *, drafts: str | None, compresses: bool) -> Rehearsal:
    """Return the rehearsal of a model. Raises UsageError if it must choose tokens, by the option `drafts`, and is
    walked with its own cache, or if it `compresses` and reads whole prompts alone."""
    found, family = rehearsal_of(model), model.config.get_text_config().model_type
    if drafts is not None and found.own_cache:
        raise UsageError(
            f"{drafts}: a {family} model is walked with its own attention and cache, where the queries that choose "
            "tokens are not seen\ntake another draft"
        )
    if compresses and not found.gaps:
        raise UsageError(
            f"--keep: where tokens are left out of a prompt, {family} gives other scores than its own forward\n"
            "leave out --draft and --keep, so that it reads whole prompts"
        )
    return found


_rehearsals: WeakKeyDictionary[PreTrainedModel, Rehearsal] = WeakKeyDictionary()
_ERRORS = (ArithmeticError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {brief(error)}"


def _prompts(config: Any) -> tuple[list[TokenArray], list[TokenArray | None]]:
    # The prompts, and their kept positions, for those that do not keep all.
    rng, vocabulary = np.random.default_rng(0), int(config.vocab_size)
    reaches = [getattr(config, name, None) for name in _REACHES]
    reaches += (getattr(config, "compress_rates", None) or {}).values()
    beyond = max((reach for reach in reaches if isinstance(reach, int) and 0 < reach <= LONGEST_REACH), default=0)

    padding = getattr(config, "pad_token_id", None)  # no prompt has it, and some models do not count it

    def words(count: int) -> TokenArray:
        drawn = rng.integers(0, vocabulary, count).astype(np.int32)
        drawn[drawn == padding] = ((padding or 0) + 1) % vocabulary
        return drawn

    root, middle = words(23 + beyond), words(11)
    tails = [words(n) for n in (1, 7, 12)]
    prompts = [np.concatenate([root, middle, tail]) for tail in tails]
    prompts += [np.concatenate([root, tails[2]]), words(19), words(13 + beyond)]
    kept: list[TokenArray | None] = [None] * len(prompts)
    spread = np.arange(2 * len(prompts[-1]) + 5, dtype=np.int32)
    kept[-1] = spread[spread // 5 % 2 == 0][: len(prompts[-1])]
    return prompts, kept


@contextmanager
def _layers_used(model: PreTrainedModel, source: LayerSource | None) -> Iterator[None]:
    # In this context the model's own forward takes the weights of its layers from `source`, one layer at a time.
    if source is None:
        yield
        return
    with ExitStack() as hooks, ExitStack() as used:

        def take(index: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                used.enter_context(source.use(index))

            return hook

        def give_back(*_: Any) -> None:
            used.close()

        for index, layer in enumerate(decoder_layers(model).layers):
            hooks.callback(layer.register_forward_pre_hook(take(index)).remove)
            hooks.callback(layer.register_forward_hook(give_back).remove)
        try:
            yield
        finally:
            used.close()
            source.end_pass()


def _own_forward(
    model: PreTrainedModel,
    prompts: Sequence[TokenArray],
    kept: Sequence[TokenArray | None],
    layers: LayerSource | None,
) -> list[torch.Tensor]:
    device = embedding_device(model)
    rows = []
    for prompt, positions in zip(prompts, kept, strict=True):
        ids = torch.as_tensor(prompt, dtype=torch.long, device=device)[None]
        given = {}
        if positions is not None:  # with a mask, transformers does not take gaps for packed sequences
            given = {"position_ids": torch.as_tensor(positions, device=device).long()[None]}
            given["attention_mask"] = torch.ones_like(ids)
        taken = inspect.signature(model.forward).parameters
        given = {name: value for name, value in given.items() if name in taken}
        with torch.inference_mode(), _layers_used(model, layers):
            rows.append(last_row(model(input_ids=ids, use_cache=False, **given).logits))
    return rows


def _agree(*compared: Any) -> bool:
    try:
        _compare(*compared)
    except (*_ERRORS, UnsupportedModelError):
        return False
    return True


def _unseen_windows(config: Any) -> set[KeyWindow]:
    # The windows of some layers that are longer than a rehearsal's prompts.
    windows = set()
    sliding, chunk = Shape(config).sliding_window, getattr(config, "attention_chunk_size", None)
    if sliding is not None:
        windows.add(KeyWindow(sliding))
    if chunk and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        windows.add(KeyWindow(chunk, aligned=True))
    return {window for window in windows if window.size > LONGEST_REACH}


def _compare(
    model: PreTrainedModel,
    config: Any,
    prompts: Sequence[TokenArray],
    kept: Sequence[TokenArray | None],
    wanted: Sequence[torch.Tensor],
    layers: LayerSource | None,
    tolerance: float | None,
    exact: Sequence[torch.Tensor] | None = None,
) -> None:
    # Walk the prompts with the attention that the model has. Raises UnsupportedModelError if it does not work.
    walk = LayerWalk(model, chunk_tokens=9, layers=layers)
    try:
        found: dict[int, torch.Tensor] = {}
        limits = Limits(48, 1 << 20, held_tokens=1 << 20, whole_nodes=True)
        for pack in make_plan(prompts, limits, positions=kept).packs:
            logits = torch.cat(list(walk.read_logits(pack)))
            found |= {n: logits[i] for i, (_, numbers) in enumerate(pack.reads) for n in numbers}
    finally:
        walk.close()
    if has_forest_attention(model) and not _unseen_windows(config) <= walk.windows:
        raise UnsupportedModelError("it does not pass its sliding window to its attention function")
    worst = max(float((found[i] - row).abs().max()) for i, row in enumerate(wanted))
    scale = max(float(row.abs().max()) for row in wanted)
    if not worst <= (tolerance or _REHEARSAL_TOLERANCE[model.dtype]) * max(scale, 1.0):
        raise UnsupportedModelError(f"its logits differ by {worst:.2g} from its own forward")
    if exact is None:
        return
    # The prompt in the middle counts: in a mixture of experts, a last bit may choose another expert for one of them.
    errors = [
        median(float((row - true).square().mean().sqrt()) for row, true in zip(rows, exact, strict=True))
        for rows in ([found[i] for i in range(len(wanted))], wanted)
    ]
    if not errors[0] <= HALF_PRECISION_FACTOR * errors[1]:
        raise UnsupportedModelError(
            f"its logits are off by {errors[0]:.2g} from those in float32, and its own forward's by {errors[1]:.2g}"
        )


# Whether a device computes correctly, and how fast: found once, remembered in the user's cache for later runs.


FILE = "devices.json"
MOST = 64  # devices that are remembered
# Kinds of devices on which the tests compare the verified families with their own forward.
TESTED = frozenset({"cpu"})

# Paths that the doctor alone checks, because they are compiled for that. For runs that take them, rehearsals cover
# them.
SLOW_TO_CHECK = frozenset({"flex"})
_FOUND = ("paths", "families", "speeds")  # what a record has


class DeviceRecord:
    """The record of a device: the attention paths that failed, the families that were rehearsed on it, and the speed
    of its products.

    `paths` has None, or why it failed, under PATH/DTYPE. `families` has, under FAMILY/DTYPE, whether only explicit
    blocks of scores agreed. `speeds` has, under FORM/DTYPE, how many times as long a product takes in the form,
    and under operations/DTYPE the operations of a second.
    """

    def __init__(self, device: torch.device) -> None:
        self.key = devices.device_key(device)
        self._kept = KeptEntries(FILE)
        self.paths: dict[str, str | None] = {}
        self.families: dict[str, bool] = {}
        self.speeds: dict[str, float] = {}
        known = self._kept.read().get(self.key.digest)
        if isinstance(known, dict) and all(isinstance(known.get(name), dict) for name in _FOUND):
            self.paths, self.families, self.speeds = (known[name] for name in _FOUND)

    @property
    def tested(self) -> bool:
        """True if the tests know this kind of device."""
        return self.key.kind in TESTED

    def save(self) -> bool:
        """Save it; returns whether the cache could be written. Findings that others saved meanwhile stay."""
        entries = self._kept.read()
        before: dict[str, Any] = entries.get(self.key.digest, {})
        found = {name: before.get(name, {}) | getattr(self, name) for name in _FOUND}
        entries[self.key.digest] = {"of": asdict(self.key), **found, "time": int(time.time())}
        return self._kept.write(dict(sorted(entries.items(), key=lambda item: -item[1]["time"])[:MOST]))

    def note(self, checks: Iterable[PathCheck]) -> None:
        """Take note of checks, except for paths that this device lacks."""
        for check in checks:
            if check.status != "not here":
                self.paths[f"{check.path}/{check.dtype}"] = None if check.status == "agrees" else str(check.why)


def settle_paths(device: torch.device, dtype: torch.dtype) -> None:
    """Rule out the paths that differ from explicit scores, before a model of this `dtype` computes on `device`.

    Paths not yet known on this device are checked and remembered. A path that is not taken is reported on stderr.
    Raises ResourceError where even explicit scores are wrong.
    """
    record, name = DeviceRecord(device), str(dtype).removeprefix("torch.")
    quick = [path for path in CHECKED if path not in SLOW_TO_CHECK and may_take(path, device)]
    unknown = [path for path in quick if f"{path}/{name}" not in record.paths]
    checks = [check for check in check_paths(unknown, device, dtype) if check.status != "not here"]
    if checks:
        record.note(checks)
        record.save()
    for path in CHECKED:
        why = record.paths.get(f"{path}/{name}")
        if why is None or not may_take(path, device):
            continue
        if path == "blocks":
            raise ResourceError(
                f"{device} computes attention wrongly in {name}: {why}\ntake another --device or --dtype; "
                "prefill doctor shows what it can do"
            )
        log.warning(
            f"attention on {device} goes without {path}, which is wrong there in {name}: {why} "
            "(prefill doctor checks again)"
        )
        rule_out(path, device, why)


@no_advice()  # on towers that a text model has not
def prove_model(
    model: PreTrainedModel, files: ModelFiles, layers: LayerSource | None = None, *, tolerance: float | None = None
) -> None:
    """Compare a model's walk with its own forward, before it is used, unless they are known to agree.

    That is known for verified families on devices that the tests know, and for families that agreed on this device
    before. Where a model does not agree on a device that the tests do not know, it is compared again with attention by
    explicit scores alone. Raises UnsupportedModelError where it still does not agree. `layers` and `tolerance` as in
    `rehearse`.
    """
    device, family = embedding_device(model), files.family
    record = DeviceRecord(device)
    once = partial(rehearse, model, files.config, layers, tolerance=tolerance)
    if record.tested:
        if family not in VERIFIED:
            once()
        return
    name = f"{family}/{str(files.dtype).removeprefix('torch.')}"
    if files.quantised is not None:
        name += f"/{files.quantised.get('quant_method')}"
    known = record.families.get(name)
    if known:
        _go_by_blocks(family, device)
    if known is None or family not in VERIFIED:
        found, by_blocks = _rehearse_on_unknown(partial(once, strictly=True), family, device)
        if found.gaps and not found.own_cache:  # else the next run must rehearse it again
            record.families[name] = by_blocks
            record.save()


def _rehearse_on_unknown(once: Callable[[], Rehearsal], family: str, device: torch.device) -> tuple[Rehearsal, bool]:
    # Rehearse on a device that the tests do not know; also returns whether only explicit scores agreed.
    others = any(may_take(path, device) for path in PATHS if path != "blocks")
    found: Rehearsal | None = None
    try:
        found = once()
    except UnsupportedModelError:
        if not others:
            raise
    if found is not None and not (found.own_cache and family in VERIFIED and others):
        return found, False
    _go_by_blocks(family, device)
    return once(), True


def _go_by_blocks(family: str, device: torch.device) -> None:
    log.warning(
        f"on {device} a {family} model agrees with its own forward only where attention uses "
        "explicit scores, which are slower (prefill doctor checks the others)"
    )
    only_blocks(device, f"a {family} model did not agree with its own forward")
