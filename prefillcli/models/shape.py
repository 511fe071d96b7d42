"""The sizes of a text model, by its transformers configuration: the one place that says what its settings mean.

The memory law, the count of operations and the sliding windows follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prefillcli.errors import PrefillError

#: Kinds of layers, in a configuration's `layer_types`, by what a query in them sees.
SEE_ALL = frozenset({"full_attention", "attention", "hybrid", "indexed_attention"})
SEE_A_WINDOW = frozenset({"sliding_attention", "hybrid_sliding"})
DO_NOT_ATTEND = frozenset({"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe", "sparse", "dense"})


class NoCostModel(PrefillError):
    """A configuration lacks a size, or has one that is not known here. The message names the family and the size."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """The gated MLP of one layer, or its experts. Widths are those between the matrices."""

    width: int  # of the dense MLP, or of one expert
    experts: int = 0  # that a token goes through; 0 for a dense MLP
    routed: int = 0  # numbers that the router, and the gate of shared experts, give a token
    shared: int = 0  # width of the experts that every token goes through, together


def usual_settings(config: Any) -> Any:
    """The settings of a decoder with usual attention as wide as the model that `config` describes.

    For families whose settings have other names: what is known of them is kept. Raises NoCostModel if the width of the
    model is not.
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
    """Sizes of a text configuration. Each is read when it is asked for, and raises NoCostModel if it is not there.

    What a configuration leaves out falls back as it does in transformers.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self._needed("hidden_size")

    @property
    def heads(self) -> int:
        """Attention heads."""
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
        """Tokens of the vocabulary."""
        return self._needed("vocab_size")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self._needed("num_hidden_layers")

    @property
    def sliding_window(self) -> int | None:
        """How many tokens the layers with a sliding window see, a token's own included; None without such layers."""
        slides = "sliding_attention" in (getattr(self._config, "layer_types", None) or ["sliding_attention"])
        switched_on = getattr(self._config, "use_sliding_window", True)
        return (self._first("sliding_window") or None) if slides and switched_on else None

    @property
    def windows(self) -> list[int | None]:
        """How many tokens a query of each layer sees: None for all before it, 0 in a layer without attention."""
        # Families without layer_types (mistral, mixtral, phi3) slide in every layer or in none.
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention"] * self.layers
        seen = dict.fromkeys(SEE_ALL, None) | dict.fromkeys(SEE_A_WINDOW, self.sliding_window)
        seen |= dict.fromkeys(DO_NOT_ATTEND, 0) | {"chunked_attention": self._first("attention_chunk_size") or None}
        if strange := set(kinds) - seen.keys():
            raise NoCostModel(f"{self._config.model_type} has layers of type {', '.join(sorted(strange))}")
        return [seen[kind] for kind in kinds]

    @property
    def ropes(self) -> int:
        """How many rotary encodings the layers have: one each for some kinds of layers, or one for all."""
        parameters = getattr(self._config, "rope_parameters", None) or {}
        return max(1, sum(isinstance(each, dict) for each in parameters.values()))

    @property
    def inner(self) -> int:
        """Inner width of the MLP: of a dense one, or of a token's experts with an input row for each."""
        width = self._first("intermediate_size") or 4 * self.hidden
        experts = self._first("num_experts_per_tok")
        return experts * ((self._first("moe_intermediate_size") or width) + self.hidden) if experts else width

    def mlp(self, layer: int) -> Mlp:
        """The MLP of a layer."""
        experts = self._first("num_local_experts", "num_experts", "n_routed_experts")
        if not experts or self._is_dense(layer):
            return Mlp(self._needed("intermediate_size"))
        width = self._first("moe_intermediate_size", "intermediate_size")
        gated = self._first("shared_expert_intermediate_size")  # qwen2_moe: one shared expert behind a gate of its own
        shared = gated or self._first("shared_intermediate_size") or self._first("n_shared_experts") * width
        return Mlp(width, self._needed("num_experts_per_tok"), experts + (1 if gated else 0), shared)

    def _is_dense(self, layer: int) -> bool:
        """Whether a layer has no experts in a model that has some."""
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
        """The first of these settings that is there and is not 0 or None; else 0.

        Raises NoCostModel for one that is not a number: some families give one for each layer.
        """
        for name in names:
            if value := getattr(self._config, name, None):
                if not isinstance(value, int):
                    raise NoCostModel(f"{name} of {self._config.model_type} is {value!r}, not one number")
                return value
        return 0
