"""What a pack costs in memory, and what fits a budget.

The memory law of the layer walk: per token one row of the residual stream and one layer's K,V, and per chunk a
constant. Everything else a layer makes lives for one chunk. Recurrent layers add one layer's states for each open
branch, and a held node keeps those of all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from prefillcli.decode.row_attention import whole_steps
from prefillcli.errors import ResourceError
from prefillcli.models.families import FLOAT32_ROTARY, VERIFIED
from prefillcli.models.meta_forward import ModelSizes, NoSizesError, model_sizes
from prefillcli.models.shape import Shape, usual_settings
from prefillcli.plan.pack import Limits
from prefillcli.prefill.fusion import copy_pays
from prefillcli.prefill.model_ends import logit_bytes
from prefillcli.prefill.own_cache import JOINED_PATHS, SCORE_BYTES
from prefillcli.prefill.recurrent import STATE_BYTES
from prefillcli.runtime.memory import available_memory

#: A pack this large keeps every core or tensor core busy; a larger one only loses more work when it is killed.
PACK_TOKENS = {"cpu": 65_536, "cuda": 262_144, "mps": 65_536}
CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192, "mps": 2048}
MIN_CHUNK_TOKENS = 64
CHUNK_SHARE = 1 / 8  # of the budget, at most, for what a layer makes of one chunk
FREE_SHARE = 0.7  # of the free memory, taken where no budget is given
VOTES_SHARE = 0.25  # of a draft's budget, for the importance of tokens
POSITION_BYTES = 8
HELD_SHARE = 0.5  # of the budget, at most, for K,V kept from pack to pack
#: Copies of one layer's K,V that a token takes on the device while its K,V are in host memory: the ones that are used,
#: and on a GPU those that leave, those that were fetched and those that come.
HELD_COPIES = {"cpu": 1, "cuda": 4, "mps": 4}
OPEN_BRANCHES = 8  # nodes on a path whose states wait for what follows them
ACTIVATION_COPIES = 2  # of what a layer's modules make: the walk gathers rows, and puts them back


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Bytes of a walk over a model with these numbers, in its dtype."""

    residual: int  # a token's row of the residual stream
    key_value: int  # a token's K,V in one layer
    rotary: int  # a token's position, and its encoding
    layers: int
    transient: int  # what a layer makes for one token of a chunk
    vocabulary: int
    weights: int = 0  # of a layer's linear parts
    outputs: int = 0  # numbers that those give for one token
    size: int = 4  # bytes of a number
    beyond: int = 0  # a token's bytes that were measured and are none of these
    host: int = 0  # a token's bytes in host memory, where the residual stream is kept there
    all_key_values: int = 0  # a token's K,V in all layers
    states: int = 0  # of all layers at the end of a node
    layer_states: int = 0  # of the layer with most
    scores: int = 0  # of attention that keeps them

    @property
    def token(self) -> int:
        """Bytes per token that last as long as the pack."""
        return self.residual + self.key_value + self.rotary + self.beyond

    def with_hidden_on_host(self) -> MemoryLaw:
        """The law of a device that holds only the residual rows of a few chunks; the host holds them all."""
        rows = 3 * self.residual  # of a chunk: read ahead, computed, written back
        return replace(self, residual=0, host=self.residual, transient=self.transient + rows)

    def with_own_cache(self) -> MemoryLaw:
        """The law of a model that is walked with its own attention and cache.

        A token's K,V are in the parts of its path, in the paths that are joined, in the one that a call makes longer,
        and once more where fewer heads of K,V are repeated for those of the queries.
        """
        return replace(self, key_value=(JOINED_PATHS + 3) * self.key_value, scores=2 * SCORE_BYTES)

    def measured(self, token: float | None) -> MemoryLaw:
        """The law with the measured bytes of a token, where they are more; None if they were not measured."""
        return replace(self, beyond=max(0, math.ceil((token or 0) - self.token)))

    def constant(self, chunk_tokens: int, device: torch.device) -> int:
        """Bytes per pack whatever its size: a chunk's activations, logits, and on a CPU a layer's weights laid out."""
        copied = device.type == "cpu" and copy_pays(self.weights, self.outputs, chunk_tokens)
        size = self.transient * chunk_tokens + 3 * logit_bytes(device, self.vocabulary)
        batched = min(STATE_BYTES, chunk_tokens * self.layer_states)
        size += OPEN_BRANCHES * self.layer_states + 2 * batched
        return size + self.scores + (self.weights * self.size if copied else 0)


def memory_law(config: Any, dtype: torch.dtype, classes: int | None = None) -> MemoryLaw:
    """The law for a transformers text configuration: by its settings for verified families, whose names are known;
    else as the model's own forward shows it. Where that does not run without numbers, the settings are taken for those
    of usual attention. With a classification head, a token has as many logits as there are `classes`. Raises
    NoCostModel if the settings lack even the width of the model."""
    law = _vocabulary_law(config, dtype)
    return law if classes is None else replace(law, vocabulary=classes)


def _vocabulary_law(config: Any, dtype: torch.dtype) -> MemoryLaw:
    if config.model_type not in VERIFIED:
        try:
            return _law_of(model_sizes(config, dtype), config, dtype)
        except NoSizesError:
            config = usual_settings(config)
    shape, size = Shape(config), dtype.itemsize
    # Normed rows in float32 and rows in dtype; q, k, v before and after rotation and the output twice; gate, up,
    # their product and its activation.
    rows = shape.hidden * (3 * 4 + 3 * size)
    rotary = torch.float32.itemsize if config.model_type in FLOAT32_ROTARY else size
    attention = 4 * (shape.heads + shape.kv_heads) * shape.head_width
    return MemoryLaw(
        residual=shape.hidden * size,
        key_value=2 * shape.kv_heads * shape.head_width * size,
        rotary=2 * shape.head_width * shape.ropes * rotary + POSITION_BYTES,
        layers=shape.layers,
        transient=rows + size * (attention + 4 * shape.inner),
        vocabulary=shape.vocabulary,
        weights=shape.hidden * (2 * shape.head_width * (shape.heads + shape.kv_heads) + 3 * shape.inner),
        outputs=shape.head_width * (shape.heads + 2 * shape.kv_heads) + 2 * (shape.hidden + shape.inner),
        size=size,
        all_key_values=2 * shape.kv_heads * shape.head_width * size * shape.layers,
    )


def _law_of(sizes: ModelSizes, config: Any, dtype: torch.dtype) -> MemoryLaw:
    """The law of a model whose forward was watched."""
    largest = max(sizes.layers, key=lambda layer: layer.before + layer.behind)
    # What attends without a cache of transformers keeps at most a row of the residual stream for K, and one for V.
    key_values = [layer.key_value or 2 * sizes.residual * layer.attends for layer in sizes.layers]
    return MemoryLaw(
        residual=sizes.residual,
        key_value=max(key_values),
        rotary=sizes.arguments + POSITION_BYTES,
        layers=len(sizes.layers),
        transient=ACTIVATION_COPIES * max(layer.transient for layer in sizes.layers),
        vocabulary=Shape(config).vocabulary,
        weights=int(largest.before + largest.behind) // 2,
        outputs=max(layer.transient for layer in sizes.layers) // dtype.itemsize,
        size=dtype.itemsize,
        all_key_values=sum(key_values),
        states=sum(layer.states for layer in sizes.layers),
        layer_states=max(layer.states for layer in sizes.layers),
    )


def choose_chunk(law: MemoryLaw, budget: int, device: torch.device) -> int:
    """Tokens of one call of a layer: what is fast on the device, halved until it takes a small part of the budget."""
    tokens = CHUNK_TOKENS[device.type]
    while tokens > MIN_CHUNK_TOKENS and law.transient * tokens > budget * CHUNK_SHARE:
        tokens //= 2
    return tokens


def pack_limits(
    law: MemoryLaw,
    *,
    budget: int,
    device: torch.device,
    chunk_tokens: int,
    pack_tokens: int | None = None,
    prefix_kv: str = "auto",
) -> Limits:
    """What fits one pack in `budget` bytes. Raises ResourceError if not even a small prompt does."""
    if prefix_kv not in ("auto", "discard", "keep", "offload"):
        raise ValueError(f"{prefix_kv!r} is not a --prefix-kv: use auto, discard, keep or offload")
    room = budget - law.constant(chunk_tokens, device)
    most = room // law.token
    if law.host:
        most = min(most, int(available_memory(torch.device("cpu")) * FREE_SHARE) // law.host)
    if most < 16:
        need = law.constant(chunk_tokens, device) + 16 * law.token
        smaller = " or lower --chunk-tokens" if law.transient * chunk_tokens > need / 2 else ""
        raise ResourceError(
            f"a memory budget of {budget / 2**20:,.0f} MiB is too small: this model needs {need / 2**20:,.0f} MiB "
            f"with --chunk-tokens {chunk_tokens}; raise --memory{smaller}"
        )
    all_layers = max(law.all_key_values, 1)
    in_place = prefix_kv in ("auto", "keep")
    held = 0 if prefix_kv == "discard" else int(room * HELD_SHARE) // all_layers
    if prefix_kv == "offload":
        held = available_memory(torch.device("cpu")) // 2 // all_layers
    return Limits(
        tokens=min(pack_tokens or PACK_TOKENS[device.type], most),
        max_tokens=most,
        held_tokens=held,
        held_cost=(all_layers if in_place else law.key_value * HELD_COPIES[device.type]) / law.token,
        whole_nodes=law.states > 0,
        node_tokens=math.ceil(law.states / all_layers),
    )


def draft_limits(
    law: MemoryLaw, *, budget: int, device: torch.device, chunk_tokens: int, queries: int, all_layers: bool
) -> Limits:
    """What fits one pack of a draft that is walked for the importance of tokens, with `queries` for each prompt.

    With `all_layers` the K,V of every layer are kept until tokens are decoded. Importance takes a float32 for each
    token of each prompt and query. Nothing is held between packs. Raises ResourceError if nothing fits.
    """
    room = budget - law.constant(chunk_tokens, device)
    votes = int(room * VOTES_SHARE) // (4 * queries)
    token = law.token + (law.all_key_values - law.key_value if all_layers else 0)
    most = (room - 4 * queries * max(votes, 0)) // token
    if most < 16 or votes < 16:
        raise ResourceError(
            f"a memory budget of {budget / 2**20:,.0f} MiB is too small for the draft model; raise --memory"
        )
    return Limits(tokens=min(PACK_TOKENS[device.type], most), max_tokens=most, read_tokens=votes)


# What of a budget is for texts behind prompts: K,V of all layers, while prompts are scored and while they are
# written on.
#
# A pack whose K,V are kept takes those of all layers beside the residual stream: on a CUDA device in host memory,
# else in the budget itself. When it is scored, the residual stream is gone, and texts take its place.


TextsOf = Literal["all", "some", "later"]
"""Behind which prompts texts are written: all, or some by their scores. Later: what is kept of a pack cannot be used,
because who is wanted is known only after other packs, or because prompts are not read to the end as they are."""

LEAST_KEPT = 16  # tokens of a pack; less is nothing
HELD_BESIDE_KEPT = 1 / 8  # of the budget, at least, for what is held from pack to pack beside a pack that is kept
PINNED_ROUNDING = 2  # torch rounds the size of pinned memory up to a power of two
LEAVING_LAYERS = 2  # whose K,V are on a CUDA device at a time: of the one that is computed, and a copy that leaves
SOME_SHARE = 0.1  # of the prompts that texts are written behind, where only their scores tell
PACK_OVERHEAD = 1 / 8  # what a pack costs beside its tokens, in chunks


@dataclass(frozen=True, slots=True)
class KeepOrAgain:
    """Whether K,V survive scoring, or prompts that are wanted are read again, and why."""

    kept: bool
    reason: str


def limits_with_texts(
    limits: Limits,
    law: MemoryLaw,
    *,
    room: int,
    device: torch.device,
    text_tokens: int,
    offloaded: bool = False,
    share: float = 1.0,
) -> Limits:
    """Limits with room for texts of `text_tokens` each, in `room` bytes: the budget without what packs of any size
    take. K,V that are held from pack to pack are in it, or `offloaded`. `share` is the part of the free host memory
    that may be used, if K,V leave a device. `kept_tokens` is 0 where not even a small prompt fits with a text."""
    held_here = 0 if offloaded else law.all_key_values
    on_host = device.type == "cuda"
    leaving = LEAVING_LAYERS * law.key_value
    kept_token = law.token - law.key_value + (leaving if on_host else law.all_key_values)
    least, most = int(room * HELD_BESIDE_KEPT), limits.held_tokens * held_here
    held = min(most, max(least, room - limits.tokens * kept_token))
    text_token = max(law.all_key_values + law.key_value, law.residual)
    kept, written = (room - held) // kept_token, (room - held) // text_token
    if on_host:
        free = int(available_memory(torch.device("cpu")) * FREE_SHARE * share)
        free -= limits.held_tokens * law.all_key_values * offloaded + law.host * limits.max_tokens
        kept = min(kept, free // (PINNED_ROUNDING * max(law.all_key_values, 1)))
    kept_end = law.states / text_token
    row_tokens = replace(limits, kept_end=kept_end).row_tokens
    kept = int(min(kept, written - whole_steps(text_tokens) - row_tokens))
    if kept < LEAST_KEPT:
        return limits
    return replace(
        limits,
        kept_tokens=kept,
        kept_held_tokens=held // held_here if held_here else limits.held_tokens,
        kept_end=kept_end,
        written_tokens=written,
    )


def keep_or_again(limits: Limits, *, chunk_tokens: int, least_tokens: int, texts_of: TextsOf) -> KeepOrAgain:
    """Whether packs are made so that they can be kept.

    A pack costs its tokens and `PACK_OVERHEAD`, and one of less than `least_tokens` as much as one of so many, because
    it waits for weights. Packs that can be kept are taken where scoring all prompts in them costs no more than scoring
    them in packs of the usual size and reading those again, in small packs, that are wanted: all, or `SOME_SHARE`.
    """
    kept, usual = limits.kept_tokens, limits.tokens
    if not kept:
        return KeepOrAgain(False, "K,V of all layers do not fit for any prompt with a text: no text is written")
    if texts_of == "later":
        return KeepOrAgain(False, "which prompts are written on is known only when others are scored")
    if kept >= usual:
        return KeepOrAgain(True, f"K,V of all layers fit for packs of {usual:,} tokens")

    def cost(tokens: int) -> float:
        return max(tokens, least_tokens) / tokens + PACK_OVERHEAD * chunk_tokens / tokens

    small, large = cost(kept), cost(usual)
    again = small * (1.0 if texts_of == "all" else SOME_SHARE)
    if small <= large + again:
        return KeepOrAgain(True, f"packs are cut to {kept:,} tokens, not {usual:,}: K,V of all layers fit for so many")
    return KeepOrAgain(
        False,
        f"K,V of all layers fit for packs of {kept:,} tokens: scoring all prompts in such packs takes about "
        f"{small / large:.2f} times as long as in packs of {usual:,}; reading those again that are wanted takes less",
    )
