"""The measurements of `prefill profile`, each in its own process: one curve of seconds, and the longest prompt of each
mode, which the memory law predicts and a run confirms."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_memory, shown
from prefillcli.forecast.profile import (
    MOST_ERROR,
    Confirmation,
    Curve,
    ModeResult,
    Profile,
    features,
    this_machine,
)
from prefillcli.images.decoding import check_image
from prefillcli.images.image import PlacedImage
from prefillcli.models.find import ModelFiles
from prefillcli.models.images import ModelImages
from prefillcli.models.law import FREE_SHARE, choose_chunk, memory_law
from prefillcli.models.load import load_model
from prefillcli.models.open import open_model
from prefillcli.models.shape import Shape
from prefillcli.models.vision import BATCH_BYTES
from prefillcli.options.commands import ProfileSettings
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.rows.proof import hash_model
from prefillcli.runtime.memory import available_memory, keep_blocks, parse_size, set_malloc, with_peak
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.layout import split_evenly
from prefillcli.walk.model_ends import embedding_device, last_row
from prefillcli.walk.walk import LayerWalk

Tokens = npt.NDArray[np.int32]
T = TypeVar("T")

#: Modes that run transformers' own forward, which may fail on some architectures.
OF_TRANSFORMERS = ("full", "chunked")


@torch.inference_mode()
def prefill(model: PreTrainedModel, mode: str, chunk_tokens: int, prompt: Tokens) -> Tensor:
    """Return the last logits of one prompt in one mode, float32 [vocabulary]."""
    if mode not in OF_TRANSFORMERS:
        model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(model, chunk_tokens=chunk_tokens)
        try:
            return torch.cat(list(walk.read_logits(one_pack([prompt]))))[0]
        finally:
            walk.close()
    model.set_attn_implementation("sdpa")
    ids = torch.as_tensor(prompt, dtype=torch.long)[None].to(embedding_device(model))
    cache, logits = DynamicCache(), torch.empty(0)
    for start, end in split_evenly(len(prompt), len(prompt) if mode == "full" else chunk_tokens):
        part = ids[:, start:end]
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return last_row(logits)


def one_pack(prompts: Sequence[Tokens]) -> Pack:
    """Return the pack of these prompts."""
    (pack,) = make_plan(prompts, Limits(1 << 30, 1 << 30)).packs
    return pack


# The memory that a prompt takes in each mode, as a formula of the text configuration.
#
# The memory law of the layer walk is in `prefillcli.models.law`. This adds a layer's temporaries for each token
# (figure 4 of PrefillOnly), and the modes that keep or chunk other things.


_IDS = 8  # token id, int64; the position is in the law


def mode_law(mode: str, config: Any, dtype: torch.dtype, chunk_tokens: int) -> tuple[float, float]:
    """Return the number of bytes of one prompt in a mode: a constant, and those of each token.

    The walk has a row of the residual stream, one layer's K,V and the position encoding for each token. transformers'
    own forward has all layers' K,V, the layer's input, and the embedding that its caller still holds. A mode that is
    not chunked has a layer's temporaries for each token, a chunked one for each token of a chunk. Chunked prefill in
    transformers also repeats the K,V that a chunk sees for all query heads, and makes a mask over them, bool and then
    in the dtype. All have one prompt's logits, in the dtype and in float32.
    """
    law, layer, shape = memory_law(config, dtype), layer_bytes(config, dtype), Shape(config)
    logits, positions, all_layers = 8.0 * config.vocab_size, law.rotary + _IDS, law.key_value * law.layers
    if mode == "full":
        return logits, float(2 * law.residual + all_layers + positions + layer)
    chunk = layer * chunk_tokens
    if mode == "hybrid":
        return logits + chunk, float(law.residual + law.key_value + positions)
    groups = shape.heads / shape.kv_heads
    repeated = law.key_value * groups if groups > 1 else 0
    mask = chunk_tokens * (1 + dtype.itemsize)
    return logits + chunk + chunk_tokens * 2 * law.residual, all_layers + repeated + mask


def layer_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the number of bytes of a layer's temporaries for one token at its peak, without its input.

    The peak is in the MLP: residual, normed input, and three rows of the inner width (gate after activation, up, their
    product). Or in attention: normed input, q, k, v, and three more rows in the width of q, for its rotation or
    attention's output. Or in a norm, which computes in float32: input, square and product.
    """
    shape, size = Shape(config), dtype.itemsize
    hidden, queries, keys = shape.hidden, shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    mlp = size * (2 * hidden + 3 * shape.inner)
    attention = size * (hidden + 4 * queries + 2 * keys)
    norm = size * hidden + 4 * 3 * hidden
    return int(max(mlp, attention, norm))


# Each measurement has its own process: what one run leaves in memory would change the next, and a lack of memory may
# end it.


def in_child(task: Callable[..., T], *arguments: Any, timeout: float | None = None) -> T:
    """Return what `task(*arguments)` returns in its own process, which has then ended. `timeout` is in seconds.

    Raises ResourceError where the process ended before, was ended after the timeout or lacked memory, and any other
    error of the task.
    """
    # A fork of this process, with torch's threads, may hang. A fork of a server that has imported torch but computed
    # nothing does not hang, and it saves the seconds of the import.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    others = set(multiprocessing.active_children())
    # The process that waits for the other one ends it: that does not heed Ctrl-C itself.
    pool = ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        return pool.submit(task, *arguments).result(timeout)
    except (TimeoutError, BrokenProcessPool) as error:
        how = f"after {timeout:,.0f} seconds" if isinstance(error, TimeoutError) else "before it was done"
        raise ResourceError(f"the process was ended {how}") from None
    except Exception as error:
        if isinstance(error, PrefillError) or not out_of_memory(error):
            raise
        raise ResourceError(f"{type(error).__name__}: {brief(error)}") from None
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        pool.shutdown()


def load(settings: ProfileSettings) -> tuple[Any, ModelFiles, torch.device]:
    """Load, in a child, the model of the settings; return it with its files and its device. Raises PrefillError."""
    files, device = open_model(settings.lm)
    torch.set_num_threads(int(settings.lm.threads))
    if device.index is not None:
        torch.cuda.set_device(device)
    return load_model(files, device, trust_remote_code=settings.lm.trust_remote_code), files, device


def random_prompt(tokens: int, vocabulary: int, seed: int = 0) -> Tokens:
    """Return a prompt of random tokens, int32 [tokens]: its words change neither time nor memory. The first ids are
    left out, as they are often control tokens."""
    return np.random.default_rng(seed).integers(3, vocabulary, tokens).astype(np.int32)


#: Blocks of at least this size are mapped by themselves and return to the system as soon as they are freed. By default
#: glibc raises this limit to the largest block freed so far, up to 32 MiB, and keeps smaller ones in a heap with
#: holes. Short prompts would then seem to need up to twice as much memory for each token as long ones.
_MAPPED_BYTES = 32 << 10
_ARENA_MAX = -8  # of mallopt


def make_malloc_exact() -> None:
    """Make allocated memory follow used memory: without holes left by large blocks, and in one heap, not one of 64 MiB
    or more for each thread. glibc only."""
    set_malloc(_MAPPED_BYTES, _MAPPED_BYTES)
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def run_once(settings: ProfileSettings, mode: str, tokens: int) -> tuple[int | None, float]:
    """Return, in a child, the bytes at the peak of one run above the loaded model, None if unknown, and its
    seconds."""
    make_malloc_exact()
    model, files, device = load(settings)
    for weight in model.parameters():
        weight.sum()  # weights may be mapped files: reading them for the first time is not part of a run
    chunk, vocabulary = settings.packs.chunk_tokens or 0, int(files.config.vocab_size)
    prefill(model, mode, 64, random_prompt(129, vocabulary))  # short chunks, so that one-time set-up does not count
    prompt, begun = random_prompt(tokens, vocabulary), time.perf_counter()
    _, peak = with_peak(partial(prefill, model, mode, chunk, prompt), device)
    return peak, time.perf_counter() - begun


# The curve: seconds of packs of one prompt, at lengths that double, and what a token, a prompt and a pair cost.


ATTEMPTS = 3  # at a good curve, each with more rounds
ROUNDS = 3
_LEAST_TOKENS = 16
_LEAST_POINTS = 4
_LONGEST_SHARE = 1 / 15  # of the target: the longest prompt. All packs take some five times as long, in three rounds


def curve_lengths(seconds: Callable[[int], float], most: int, target: float) -> list[int]:
    """Return the lengths to time, at most `most` tokens, so that all rounds take about `target` seconds or less.

    `seconds(tokens)` times a prompt.
    """
    found = [_LEAST_TOKENS]
    while 2 * found[-1] <= most and (len(found) < _LEAST_POINTS or 2 * seconds(found[-1]) <= target * _LONGEST_SHARE):
        found.append(2 * found[-1])
    return found


def other_packs(longest: int, vocabulary: int) -> list[Pack]:
    """Return packs of several prompts: many short ones, fewer longer ones, one shared beginning; and two that
    only check the curve, the last ones."""
    prompt = partial(random_prompt, vocabulary=vocabulary)
    part = max(4, longest // 16)

    def behind(shared: Tokens, prompts: int, tokens: int) -> list[Tokens]:
        return [np.concatenate([shared, prompt(tokens, seed=seed)]) for seed in range(1, prompts + 1)]

    many = min(256, max(2, longest // 32))
    return [
        one_pack(behind(prompt(0), many, 16)),
        one_pack(behind(prompt(0), 8, part)),
        one_pack(behind(prompt(4 * part), 16, part // 4)),
        one_pack(behind(prompt(2 * part), 6, part // 2) + behind(prompt(3 * part, seed=9), 9, part // 3)),
        one_pack([prompt(12 * part)]),
    ]


_CHECKING = 2  # of these packs


def measure_curve(
    run: Callable[[Pack], float], lengths: Sequence[int], vocabulary: int, windows: list[tuple[int | None, int]]
) -> Curve:
    """Measure the curve through packs of one prompt of these `lengths`. `run` gives the seconds of a pack.

    In every round all packs run one after the other, so that a disturbance hits all of them. For each pack the fastest
    round counts: other programs can only make it slower. While the curve is not good enough, there are more rounds.
    """
    packs = [one_pack([random_prompt(tokens, vocabulary)]) for tokens in lengths]
    packs += other_packs(lengths[-1], vocabulary)
    counts = [features(pack, windows) for pack in packs]
    seconds = np.full(len(packs), np.inf)
    for rounds in range(ROUNDS, ATTEMPTS * ROUNDS + 1, ROUNDS):
        for _ in range(ROUNDS):
            seconds = np.minimum(seconds, [run(pack) for pack in packs])
        curve = fit_curve(counts, seconds.tolist(), lengths, windows, rounds)
        if curve.error <= MOST_ERROR:
            break
    return curve


def fit_curve(
    counts: Sequence[tuple[float, float, float]],
    seconds: Sequence[float],
    lengths: Sequence[int],
    windows: list[tuple[int | None, int]],
    rounds: int,
) -> Curve:
    """Fit the curve of packs with these `features` and seconds: first one prompt of each of the `lengths`, then
    others, of which the last ones only check the curve."""
    # The costs have the smallest squared relative error: divided by its seconds, each pack should give 1. Columns of
    # very different size are scaled first.
    rows = np.column_stack([np.ones(len(counts)), counts])[:-_CHECKING] / np.array(seconds)[:-_CHECKING, None]
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    costs = (nnls(rows / scale, np.ones(len(rows)))[0] / scale)[1:]
    rising = np.maximum.accumulate(seconds[: len(lengths)])
    points = [
        (tokens, float(np.dot(costs, own)), taken)
        for tokens, own, taken in zip(lengths, counts, rising.tolist(), strict=False)
    ]
    curve = Curve(costs=tuple(costs.tolist()), windows=windows, points=points, error=0.0, rounds=rounds)
    checked = list(zip(counts, seconds, strict=True))[-_CHECKING:]
    curve.error = float(np.mean([abs(curve.at(own) / taken - 1) for own, taken in checked]))
    return curve


def time_packs(settings: ProfileSettings) -> tuple[int, int, Curve]:
    """Return, in a child, the bytes that packs may take, the chunk that follows from them, and the curve.

    Without `--memory` packs may take the part of the free memory that `prefill score` would take.
    """
    model, files, device = load(settings)
    config = files.config
    free = available_memory(device)
    budget = parse_size(settings.packs.memory) if settings.packs.memory else int(free * FREE_SHARE)
    law = memory_law(config, files.dtype)
    chunk = settings.packs.chunk_tokens or choose_chunk(law, budget, device)
    if device.type == "cpu":
        keep_blocks(budget)
    walk, vocabulary = LayerWalk(model, chunk_tokens=chunk), int(config.vocab_size)

    def run(pack: Pack) -> float:
        begun = time.perf_counter()
        for logits in walk.read_logits(pack):
            logits.sum().item()  # waits for the device
        return time.perf_counter() - begun

    def first_seconds(tokens: int) -> float:
        pack = one_pack([random_prompt(tokens, vocabulary)])
        return min(run(pack), run(pack))

    most = min(files.max_length, int((budget - law.constant(chunk, device)) / law.token))
    # The walk leaves the last layer as soon as its K,V are stored.
    attending = Shape(config).windows[:-1]
    windows = [(window, attending.count(window)) for window in dict.fromkeys(attending)]
    lengths = curve_lengths(first_seconds, most, settings.measured.fit_seconds or 0.0)
    return budget, chunk, measure_curve(run, lengths, vocabulary, windows)


_BLANK = 448  # pixels of the edges of the image that a vision tower is timed with


def time_tower(settings: ProfileSettings) -> float | None:
    """Return, in a child, the operations of a model's vision tower in a second, as `TowerShape` counts them; None for
    a model that has none, or none that is read."""
    files, device = open_model(settings.lm)
    torch.set_num_threads(int(settings.lm.threads))
    images = ModelImages(files, settings.images.max_pixels, settings.images.min_pixels)
    try:
        layout, tower = images.processing.layout(_BLANK, _BLANK), images.load_tower(device, BATCH_BYTES)
    except UsageError:
        return None
    placed = PlacedImage(0, layout.features, check_image(_blank_file(), max_pixels=_BLANK**2))
    inputs = tower.inputs(placed)

    def run() -> float:
        begun = time.perf_counter()
        tower.features([placed], lambda _: inputs)[0].sum().item()  # waits for the device
        return time.perf_counter() - begun

    return layout.operations / min(run() for _ in range(1 + ROUNDS))


def _blank_file() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_BLANK, _BLANK)).save(file, "PNG")
    return file.getvalue()


# The longest prompt of each mode.


TRIES = 3
MARGIN = 0.02  # of the length that the law allows: a margin, because the law is not exact
_SPARE_SHARE = 0.04  # of the budget: if a confirming run leaves more, a longer one is tried
_UNKNOWN_PEAK = 1.1  # of the budget: of a run that did not reach its end
_OVERTIME = 4.0  # a confirming run is stopped after this multiple of its estimate
_LOADING_SECONDS = 600.0


def profile_mode(
    mode: str, law: tuple[float, float], profile: Profile, settings: ProfileSettings, announce: Callable[[str], None]
) -> ModeResult:
    """Predict by its law and confirm the longest prompt of one mode, in the budget of the `profile`.

    `settings` are those of `prefill profile` with the chunk and a number of threads. Raises any error in the layer
    walk: only transformers may fail on an architecture, which becomes a note.
    """
    longest, (base, token) = profile.max_model_tokens, law
    by_memory = max(0, int((profile.budget_bytes * (1 - MARGIN) - base) / token))
    result = ModeResult(mode=mode, law_base=base, law_token=token, predicted_tokens=min(by_memory, longest))
    result.limited_by = "memory" if by_memory < longest else "model"
    if not result.predicted_tokens:
        result.notes.append("the budget does not even hold short prompts in this mode")
    elif settings.measured.confirm_seconds:
        try:
            _confirm(result, profile, settings, announce)
        except Exception as error:
            if mode not in OF_TRANSFORMERS or isinstance(error, PrefillError):
                raise
            result.notes.append(f"transformers fails on this model in this mode: {brief(error)}")
    return result


def _confirm(result: ModeResult, profile: Profile, settings: ProfileSettings, announce: Callable[[str], None]) -> None:
    # Run at the predicted length; then a shorter one if that does not fit, a longer one if much memory is left.
    budget, seconds = profile.budget_bytes, settings.measured.confirm_seconds or 0.0
    most = profile.tokens_within(seconds, most=profile.max_model_tokens)
    tokens, result.capped = min(result.predicted_tokens, most), most < result.predicted_tokens
    for _ in range(TRIES):
        announce(f"{result.mode}: confirming {tokens:,} tokens within {budget / 2**20:,.0f} MiB")
        found = confirming_run(result.mode, tokens, profile, settings)
        result.confirmations.append(found)
        room = budget / (found.peak_bytes or _UNKNOWN_PEAK * budget)
        if found.fits:
            result.max_tokens = max(result.max_tokens or 0, tokens)
            if room < 1 + _SPARE_SHARE or tokens == most:
                break
        tokens = min(int(tokens * room * (1 - MARGIN)), most)
    if result.max_tokens is None:
        result.notes.append("no confirming run stayed within the budget")


def confirming_run(mode: str, tokens: int, profile: Profile, settings: ProfileSettings) -> Confirmation:
    """Return how much one run takes, and whether that is within the budget."""
    timeout = _LOADING_SECONDS + _OVERTIME * profile.completion.request_seconds(tokens)
    try:
        peak, seconds = in_child(run_once, settings, mode, tokens, timeout=timeout)
    except ResourceError as error:  # a library that is denied memory may end the process
        return Confirmation(tokens=tokens, fits=False, reason=str(error))
    return Confirmation(tokens=tokens, fits=(peak or 0) <= profile.budget_bytes, peak_bytes=peak, seconds=seconds)


def measured_profile(
    settings: ProfileSettings, files: ModelFiles, device: torch.device, announce: Callable[[str], None]
) -> Profile:
    """Make all measurements of a model with the settings of `prefill profile`. Raises PrefillError."""
    dtype = str(files.dtype).removeprefix("torch.")
    found = {"model": str(files.origin), "revision": None, "dtype": dtype}
    own = settings.with_options(found | {"device": str(device), "threads": torch.get_num_threads()})
    announce("completion times: packs of several lengths")
    budget, chunk, curve = in_child(time_packs, own)
    own = own.with_options({"chunk_tokens": chunk})
    tower_speed = in_child(time_tower, own) if ModelImages(files).sees else None
    weak = f"its mean error on packs left out is {curve.error:.0%}, and {MOST_ERROR:.0%} is the most"
    profile = Profile(
        model=hash_model(files.origin),
        model_name=settings.lm.model or str(files.origin),
        family=files.family,
        dtype=dtype,
        device=str(device),
        machine=this_machine(str(device)),
        budget_bytes=budget,
        chunk_tokens=chunk,
        max_model_tokens=files.max_length,
        completion=curve,
        tower_speed=tower_speed,
        no_completion=None if curve.error <= MOST_ERROR else f"{weak}; after {curve.rounds} rounds",
        settings=shown(settings.to_json()),
    )
    for mode in dict.fromkeys(settings.measured.mode):
        law = mode_law(mode, files.config, files.dtype, chunk)
        profile.modes.append(profile_mode(mode, law, profile, own, announce))
    return profile
