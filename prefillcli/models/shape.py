"""Families and sizes of text models, by transformers' configuration: the one place that interprets its settings.

The memory law, the count of operations and the sliding windows follow from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prefillcli.errors import PrefillError, brief

if TYPE_CHECKING:
    from prefillcli.plan.plan import Plan

#: Kinds of layers, in a configuration's `layer_types`, by the keys that a query sees in them.
SEE_ALL = frozenset({"full_attention", "attention", "hybrid", "indexed_attention"})
SEE_A_WINDOW = frozenset({"sliding_attention", "hybrid_sliding"})
DO_NOT_ATTEND = frozenset({"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe", "sparse", "dense"})


class NoCostModel(PrefillError):
    """A configuration lacks a size, or has an unknown one. The message names the family and the size."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """The gated MLP of one layer, or its experts. Widths are those between the matrices."""

    width: int  # of the dense MLP, or of one expert
    experts: int = 0  # that a token goes through; 0 for a dense MLP
    routed: int = 0  # numbers that the router, and the gate of shared experts, give a token
    shared: int = 0  # width of the experts that every token goes through, together


def usual_settings(config: Any) -> Any:
    """Return the settings of a decoder with usual attention as wide as the model that `config` describes.

    For families whose settings have other names: the known ones are kept. Raises NoCostModel if the width of the model
    is unknown.
    """
    shape = Shape(config)
    kept = {}
    for name, other in (
        ("num_attention_heads", 1),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("num_hidden_layers", 1),
    ):
        value = getattr(config, name, None)
        kept[name] = value if isinstance(value, int) and value > 0 else other
    width = getattr(config, "intermediate_size", None)
    kept["intermediate_size"] = width if isinstance(width, int) else 4 * shape.hidden
    return SimpleNamespace(
        model_type=config.model_type,
        hidden_size=shape.hidden,
        vocab_size=shape.vocabulary,
        rope_parameters=getattr(config, "rope_parameters", None),
        **kept,
    )


class Shape:
    """Sizes of a text configuration. Each is read on use, and raises NoCostModel if it is missing.

    Missing settings have the defaults of transformers.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self._needed("hidden_size")

    @property
    def heads(self) -> int:
        return self._needed("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self._first("num_key_value_heads") or self.heads

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return self._first("head_dim") or self.hidden // self.heads

    @property
    def vocabulary(self) -> int:
        return self._needed("vocab_size")

    @property
    def layers(self) -> int:
        return self._needed("num_hidden_layers")

    @property
    def sliding_window(self) -> int | None:
        """The number of tokens that layers with a sliding window see, the token itself included; None without such
        layers."""
        slides = "sliding_attention" in (getattr(self._config, "layer_types", None) or ["sliding_attention"])
        switched_on = getattr(self._config, "use_sliding_window", True)
        return (self._first("sliding_window") or None) if slides and switched_on else None

    @property
    def windows(self) -> list[int | None]:
        """The number of tokens that a query of each layer sees: None for all before it, 0 in a layer without
        attention."""
        # Families without layer_types (mistral, mixtral, phi3) slide in every layer or in none.
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention"] * self.layers
        seen = dict.fromkeys(SEE_ALL, None) | dict.fromkeys(SEE_A_WINDOW, self.sliding_window)
        seen |= dict.fromkeys(DO_NOT_ATTEND, 0) | {"chunked_attention": self._first("attention_chunk_size") or None}
        if strange := set(kinds) - seen.keys():
            raise NoCostModel(f"{self._config.model_type} has layers of type {', '.join(sorted(strange))}")
        return [seen[kind] for kind in kinds]

    @property
    def ropes(self) -> int:
        """The number of the layers' rotary encodings: one each for some kinds of layers, or one for all."""
        parameters = getattr(self._config, "rope_parameters", None) or {}
        return max(1, sum(isinstance(each, dict) for each in parameters.values()))

    @property
    def inner(self) -> int:
        """Inner width of the MLP: of a dense one, or of a token's experts with an input row for each."""
        width = self._first("intermediate_size") or 4 * self.hidden
        experts = self._first("num_experts_per_tok")
        return experts * ((self._first("moe_intermediate_size") or width) + self.hidden) if experts else width

    def mlp(self, layer: int) -> Mlp:
        experts = self._first("num_local_experts", "num_experts", "n_routed_experts")
        if not experts or self._is_dense(layer):
            return Mlp(self._needed("intermediate_size"))
        width = self._first("moe_intermediate_size", "intermediate_size")
        gated = self._first("shared_expert_intermediate_size")  # qwen2_moe: one shared expert with its own gate
        shared = gated or self._first("shared_intermediate_size") or self._first("n_shared_experts") * width
        return Mlp(width, self._needed("num_experts_per_tok"), experts + (1 if gated else 0), shared)

    def _is_dense(self, layer: int) -> bool:
        # Whether a layer has no experts in a model that has some.
        kinds = getattr(self._config, "mlp_layer_types", None)
        if kinds:
            return bool(kinds[layer] == "dense")
        step = self._first("decoder_sparse_step") or 1
        by_number = layer in (getattr(self._config, "mlp_only_layers", None) or ()) or (layer + 1) % step != 0
        return by_number or layer < self._first("first_k_dense_replace")

    def _needed(self, name: str) -> int:
        value = self._first(name)
        if not value:
            raise NoCostModel(f"the configuration of {self._config.model_type} has no {name}")
        return value

    def _first(self, *names: str) -> int:
        # The first of these settings that exists and is not 0 or None; else 0. Raises NoCostModel for one that is not
        # a number: some families give one for each layer.
        for name in names:
            if value := getattr(self._config, name, None):
                if not isinstance(value, int):
                    raise NoCostModel(f"{name} of {self._config.model_type} is {value!r}, not one number")
                return value
        return 0


# The cost model: floating-point operations of a prefill, and the speedup of SpecPrefill that they predict.
#
# The multiply-adds are those of table 5 of SpecPrefill (arXiv 2502.02789, appendix E), two operations each: MLP 3BSDI,
# projections BSD^2(2 + 2H'/H), attention 2BS^2D, head BSDV. Here they are counted for the text configurations of
# transformers, with heads of any width, experts and sliding windows. Norms, rotary embeddings, softmax and the
# embedding are left out. Verified families are counted by their settings; their MLPs are gated (three matrices).
# Others are counted as their own forward multiplies (`models/law.py`). In that count all products after attention
# belong to the MLP, and so do those of layers without attention. Scans in chunks (Mamba-2, gated delta nets) are
# products, counted as transformers computes them over long prompts.


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations by part: two per multiply-add."""

    mlp: float  # with routers and shared experts
    projections: float  # of queries, keys, values and attention's output
    attention: float  # queries with keys, and weights with values
    head: float

    @property
    def total(self) -> float:
        return self.mlp + self.projections + self.attention + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.mlp + other.mlp,
            self.projections + other.projections,
            self.attention + other.attention,
            self.head + other.head,
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """Operations of one layer: for a token, and for one query with one key over all heads."""

    mlp: float
    inputs: float  # projections to queries, keys and values
    output: float
    pair: float
    window: int | None  # most keys that a query sees, itself included
    recurs: bool = False  # the last layer is then computed in full

    @property
    def keys(self) -> float:
        # Operations for a token where only K,V and states are needed.
        return self.mlp + self.inputs + self.output if self.recurs else self.inputs


def prefill_flops(config: Any, tokens: int, *, head_tokens: int = 1) -> Flops:
    """Return the operations of a causal prefill of one prompt, up to its answer.

    Each query meets itself and the keys before it, in sliding layers at most `config.sliding_window` of them. The head
    is applied to `head_tokens` tokens. For a compressed prompt, `tokens` are the kept ones: their windows hold no more
    keys than are counted here. Raises NoCostModel for a configuration with layers other than attention, or without the
    usual sizes.
    """
    layers = _layers(config)
    return _flops(config, layers, tokens, [seen_pairs(0, tokens, layer.window) for layer in layers], head_tokens)


def thinned_flops(config: Any, tokens: int, kept: int, layers: int) -> Flops:
    """Return the `prefill_flops` of a prompt of which only `kept` tokens go on after this many `layers`."""
    every = _layers(config)
    first, others = every[:layers], every[layers:]
    return _flops(config, first, tokens, [seen_pairs(0, tokens, layer.window) for layer in first], 0) + _flops(
        config, others, kept, [seen_pairs(0, kept, layer.window) for layer in others], 1
    )


def walk_flops(config: Any, plan: Plan) -> float:
    """Return the operations of a plan's packs: each token once, and in the last layer only the projections to Q, K and
    V.

    Sliding windows are counted over the tokens of a path, whatever their positions. The head is left out.
    """
    layers = _layers(config)
    tokens = sum(len(pack.tokens) for pack in plan.packs)
    nodes = [
        (start, end - begin)
        for pack in plan.packs
        for start, begin, end in zip(pack.starts, pack.offsets[:-1], pack.offsets[1:], strict=True)
    ]
    pairs = [sum(seen_pairs(start, length, layer.window) for start, length in nodes) for layer in layers[:-1]]
    return _flops(config, layers[:-1], tokens, pairs, 0).total + tokens * layers[-1].keys


def keys_share(config: Any) -> float:
    """Return the projections to Q, K and V as a share of all products with weights in the layers."""
    layers = _layers(config)
    return sum(each.inputs for each in layers) / sum(each.mlp + each.inputs + each.output for each in layers)


def _flops(config: Any, layers: Sequence[_Layer], tokens: int, pairs: Sequence[float], head_tokens: int) -> Flops:
    # `pairs` has one entry per layer.
    return Flops(
        mlp=tokens * sum(layer.mlp for layer in layers),
        projections=tokens * sum(layer.inputs + layer.output for layer in layers),
        attention=sum(count * layer.pair for count, layer in zip(pairs, layers, strict=True)),
        head=head_tokens * _head(config),
    )


def seen_pairs(start: int, length: int, window: int | None) -> float:
    """Return the keys seen by `length` queries after `start` others: the k-th token of a path sees k, or `window` if
    fewer."""
    return _triangle(start + length, window) - _triangle(start, window)


def _triangle(tokens: int, window: int | None) -> float:
    ramp = min(tokens, window) if window else tokens
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp


def _layers(config: Any) -> list[_Layer]:
    if config.model_type not in VERIFIED:
        return _watched_layers(config)
    shape = Shape(config)
    row = 2.0 * shape.hidden * shape.head_width  # of one head's projection
    inputs, output = row * (shape.heads + 2 * shape.kv_heads), row * shape.heads
    pair = 4.0 * shape.head_width * shape.heads
    return [
        _Layer(_mlp(shape.hidden, shape.mlp(number)), inputs, output, pair, window)
        for number, window in enumerate(shape.windows)
    ]


def _watched_layers(config: Any) -> list[_Layer]:
    # The layers as the model's own forward computes them. Raises NoCostModel if it cannot be run without weights.
    import torch

    from prefillcli.models.law import NoSizesError, model_sizes

    try:
        layers = model_sizes(config, torch.bfloat16).layers
    except NoSizesError as error:
        raise NoCostModel(f"the operations of {config.model_type} are not known: {brief(error)}") from None
    return [
        _Layer(each.behind + each.scan, each.before, 0.0, each.pair, each.window, recurs=each.states > 0)
        for each in layers
    ]


def _head(config: Any) -> float:
    shape = Shape(config)
    return 2.0 * shape.hidden * shape.vocabulary


def _mlp(hidden: int, mlp: Mlp) -> float:
    # Operations for one token: of a dense MLP, or of the router, the chosen experts and the shared ones.
    if not mlp.experts:
        return 6.0 * hidden * mlp.width
    return 2.0 * hidden * (mlp.routed + 3 * (mlp.experts * mlp.width + mlp.shared))


# Model families: those that are verified, and the quirks of others that keep them from being walked. A family is
# the `model_type` of a text configuration.


#: Families whose walk the tests compare with their own eager forward, as people write them. Every other one must agree
#: with its own forward in a rehearsal when it is loaded.
VERIFIED = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "phi3": "Phi-3",
    "olmo2": "OLMo 2",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "gpt_oss": "gpt-oss",
}

_FOR_BOTH = "keeps its keys in a cache for encoders and decoders"
_TOGETHER = "keeps the states of all layers together, in no cache of transformers"
#: Families that cannot be walked layer by layer, with the reasons. Other engines may score them.
UNWALKED = {
    "blt": "cuts bytes into patches with another model, and its layers read those",
    "cpmant": "puts learned tokens before each prompt",
    "hrm_text": "goes through its layers several times",
    "megatron-bert": _FOR_BOTH,
    "openai-gpt": "keeps no cache, and does not attend through the interface of transformers",
    "qwen4_exp_text": "looks up n-grams of the tokens before in its layers",
    "recurrent_gemma": "keeps its states in its modules, and its convolutions forget them in a call of several tokens",
    "reformer": "has reversible layers with two streams, and hashes the keys of a whole prompt",
    "rembert": _FOR_BOTH,
    "rwkv": _TOGETHER,
    "xlm": "changes the residual stream between its layers",
    "xlnet": "has memories instead of a cache",
    "xlstm": _TOGETHER,
}

#: Position encodings that change all positions once a prompt passes a length.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


#: Kinds of layers, in a configuration's `layer_types`, that see a selection of the tokens before.
SELECTIVE_LAYERS = frozenset(
    {
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "indexed_attention",
        "minimax_m3_sparse",
    }
)

#: Families whose position encodings stay float32, whatever the model's dtype.
FLOAT32_ROTARY = frozenset({"olmo2"})


#: Families of images and text whose text attends in both directions before the answer.
BOTH_WAYS = frozenset({"paligemma", "pi0"})

#: Families that attend in both directions unless their configuration makes them decoders.
ENCODERS = frozenset(
    {"bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
     "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"}
)  # fmt: skip

#: Encoders whose classification heads are read. Padding after a text changes nothing in them, if it is masked.
CLASSIFYING_ENCODERS = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta",
     "xlm-roberta"}
)  # fmt: skip

#: Those among them whose first token has the position after that of padding.
_PADDING_FIRST = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})


def refusal(whole: Any, text: Any, *, causal: bool) -> str | None:
    """Return why a model cannot be scored; None if its configuration gives no reason.

    `whole` is its configuration, `text` that of its text model, `causal` whether there is a causal language model of
    its family.
    """
    if getattr(whole, "is_encoder_decoder", False):
        return "is an encoder-decoder: its encoder reads a prompt, and its decoder only what it writes"
    if getattr(whole, "model_type", None) in BOTH_WAYS:
        return "reads a prompt in both directions"
    if not causal:
        return "has no causal language model in transformers"
    if getattr(text, "model_type", None) in ENCODERS and not getattr(text, "is_decoder", False):
        return "is an encoder, which attends in both directions (is_decoder is false in its configuration)"
    both_ways = getattr(text, "use_bidirectional_attention", False)  # "vision": only within an image
    if both_ways not in (None, False, "vision") or not getattr(text, "is_causal", True):
        return "attends in both directions, so it does not predict the next token"
    return None


def is_encoder(text: Any) -> bool:
    """Return whether a model with this configuration reads a text in both directions, and its classification head is
    read."""
    return text.model_type in CLASSIFYING_ENCODERS and not getattr(text, "is_decoder", False)


def sees_nothing(text: Any) -> bool:
    """Return whether layers have a sliding window of no token: transformers then masks all, and kernels differ in
    their results for that."""
    known = hasattr(type(text), "sliding_window")  # others keep the entry, and do not read it
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    return known and slides and getattr(text, "sliding_window", None) == 0


def selects_keys(text: Any) -> bool:
    """Return whether layers see tokens that an indexer selects or compresses, which an attention function does not
    learn."""
    return bool(SELECTIVE_LAYERS.intersection(getattr(text, "layer_types", None) or ()))


def length_switch(text: Any) -> int:
    """Return the longest prompt before the one way of encoding positions that longer prompts have instead; 0 without
    one."""
    rope = getattr(text, "rope_parameters", None) or {}
    return int(rope.get("original_max_position_embeddings") or 0) if rope.get("rope_type") == "longrope" else 0


def longest_prompt(text: Any, *, apart: bool = False) -> int:
    """Return the longest prompt, in tokens, that can be scored together with shorter ones as the model itself does.

    Position encodings that change all positions once a prompt passes a length make short and long prompts different
    models, so they end at that length. Where long prompts are planned apart, they may be longer than `length_switch`.
    """
    longest = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
    if text.model_type in _PADDING_FIRST:
        longest -= (text.pad_token_id or 0) + 1
    if text.model_type == "doge":  # beyond it, its layers drop keys, and others where a prompt comes in parts
        longest = min(longest, int(text.keep_window_size))
    rope = getattr(text, "rope_parameters", None) or {}
    if apart and length_switch(text):
        return longest
    for one in [rope, *(v for v in rope.values() if isinstance(v, dict))]:
        if one.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
    return longest
