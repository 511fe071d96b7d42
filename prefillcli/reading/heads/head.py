"""Heads that users fit to their right answers: a linear map of the hidden state after one layer, and its file.

The layers above a head are not needed for its answers. The file keeps the hidden states of the rows that the head was
fitted to, so that more rows can be added later without reading these again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from prefillcli.engines.base import Readings
from prefillcli.errors import UsageError, without_secrets
from prefillcli.rows.output.store import read_sealed
from prefillcli.rows.proof import hash_value
from prefillcli.stats.arrays import Float32Array, Float64Array

SCHEMA_VERSION: Final = 1
_AGAIN = "make it with prefill fit"
HEAD: Final = "the head"
"""Its name among those whose answers are compared (`FittedHead.held_out`)."""


def _read_numbers(value: Any) -> Any:
    # An array of float32 or int64, from the form that `_written` gives it.
    if isinstance(value, np.ndarray):
        return value
    try:
        (kind, text), shape = next((k, v) for k, v in value.items() if k != "shape"), value["shape"]
        data = np.frombuffer(base64.b64decode(text, validate=True), dtype=_KINDS[kind])
        found = data.reshape([int(each) for each in shape])
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration, binascii.Error) as error:
        raise ValueError(f"an array is damaged: {error}") from None
    if not np.isfinite(found).all():
        raise ValueError("an array has values that are not finite")
    return found.astype(found.dtype.newbyteorder("="))


_KINDS: Final = {"float32": "<f4", "float64": "<f8", "int64": "<i8"}


def _written(array: npt.NDArray[Any]) -> dict[str, Any]:
    kind = array.dtype.name
    text = base64.b64encode(np.ascontiguousarray(array, dtype=_KINDS[kind]).tobytes()).decode()
    return {"shape": list(array.shape), kind: text}


Numbers = Annotated[Any, BeforeValidator(_read_numbers), PlainSerializer(_written)]
"""An array, as base64 in JSON."""


@dataclass(frozen=True, eq=False)
class HeadRule:
    """Answers a question by the hidden state after one layer. It is a `LeavingRule`: all prompts leave there.

    The logits are `(hidden - mean) / scale @ weights + bias`, with `mean` and `scale` [hidden], `weights` [hidden,
    answers] and `bias` [answers], float64. With `peek` no prompt goes on after the layer.
    """

    layer: int
    mean: Float64Array
    scale: Float64Array
    weights: Float64Array
    bias: Float64Array
    peek: bool = True
    reads_logits: ClassVar[bool] = False

    @property
    def layers(self) -> tuple[int, ...]:
        return (self.layer,)

    @cached_property
    def digest(self) -> str:
        """What distinguishes it from others."""
        return hash_value([self.layer, self.peek, *(each.tobytes().hex() for each in self._arrays)])

    @property
    def _arrays(self) -> tuple[Float64Array, ...]:
        return self.mean, self.scale, self.weights, self.bias

    def peeks(self, layer: int) -> bool:
        return self.peek

    def features(self, hidden: Float32Array) -> Float64Array:
        """Return hidden states [rows, hidden] less the mean, over the scale."""
        return np.asarray((hidden.astype(np.float64) - self.mean) / self.scale, np.float64)

    def logits(self, hidden: Float32Array) -> Float64Array:
        """Return the logits of the answers [rows, answers]. A row's do not depend on the others': each has a product
        of its own."""
        across = np.ascontiguousarray(self.weights.T)
        return np.array([across @ row + self.bias for row in self.features(hidden)]).reshape(len(hidden), -1)

    def decide(self, layer: int, readings: Readings) -> tuple[npt.NDArray[np.bool_], Float64Array]:
        """See `LeavingRule`."""
        logits = self.logits(readings.hidden)
        return np.ones(len(logits), np.bool_), logits - np.logaddexp.reduce(logits, axis=1)[:, None]


def moments(hidden: Float32Array) -> tuple[Float64Array, Float64Array]:
    """Return the mean and the standard deviation of hidden states [rows, hidden], both [hidden]; 1 for a channel whose
    numbers are all the same."""
    wide = hidden.astype(np.float64)
    spread = wide.std(axis=0)
    return wide.mean(axis=0), np.where(spread > 0, spread, 1.0)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Quality(_Frozen):
    """How good probabilities are on held-out rows: `ece` is the expected calibration error."""

    accuracy: float
    log_loss: float
    brier: float
    ece: float


class FittedHead(_Frozen):
    """The head of one question.

    `question` is its name, empty for the only one without a name, and `wording` a digest of all words around a row's
    own. `hidden` [rows, hidden] and `truth` [rows] are those of the rows that it was fitted to, and `prompts` [rows]
    their digests. `strength` is the ridge's, in units of the features' variance. `held_out` is the quality of answers
    on rows that chose nothing, by who gives them.
    """

    question: str = ""
    labels: tuple[str, ...] = Field(min_length=2)
    wording: str
    layer: int = Field(ge=1)
    weights: Numbers
    bias: Numbers
    hidden: Numbers
    truth: Numbers
    prompts: Numbers
    strength: float = Field(gt=0)
    held_out: dict[str, Quality] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> FittedHead:
        rows, width = self.hidden.shape if self.hidden.ndim == 2 else (0, 0)
        answers = len(self.labels)
        if not (
            rows > 1
            and self.truth.shape == self.prompts.shape == (rows,)
            and self.weights.shape == (width, answers)
            and self.bias.shape == (answers,)
            and ((self.truth >= 0) & (self.truth < answers)).all()
        ):
            raise ValueError("its arrays do not fit together")
        return self

    def rule(self) -> HeadRule:
        """Return what answers the question."""
        mean, scale = moments(self.hidden)
        weights, bias = np.asarray(self.weights, np.float64), np.asarray(self.bias, np.float64)
        return HeadRule(self.layer - 1, mean, scale, weights, bias)


class HeadFile(_Frozen):
    """The heads of a job's questions, and what they were fitted on. It has no date: the same rows make the same file.

    `model` is a digest of all that makes hidden states of tokens, and `layers` the number of the model's layers. In
    `compute`, a low precision, it computes instead of in its `dtype`.
    """

    kind: Literal["prefill head"] = "prefill head"
    schema_version: Literal[1] = SCHEMA_VERSION
    model: str
    layers: int = Field(ge=1)
    dtype: str
    compute: str | None = None
    heads: tuple[FittedHead, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _within(self) -> HeadFile:
        if any(each.layer > self.layers for each in self.heads):
            raise ValueError(f"a head reads a layer above the model's {self.layers}")
        if len({each.question for each in self.heads}) < len(self.heads):
            raise ValueError("two heads are of one question")
        return self

    @property
    def by_question(self) -> Mapping[str, FittedHead]:
        """The heads by the names of their questions."""
        return {each.question: each for each in self.heads}

    @property
    def deepest(self) -> int:
        """The number of layers that their answers need."""
        return max(each.layer for each in self.heads)

    def to_json(self) -> str:
        """Return the content of the file: text that ends with a line feed."""
        return self.model_dump_json(indent=1) + "\n"


def head_file_at(path: str, option: str = "--head") -> HeadFile:
    """Return the heads at a local path or URL. Raises UsageError for any other file, or one that was changed."""
    content, sealed = read_sealed(option, path, _AGAIN)
    shown = f"{option} {without_secrets(path)}"
    try:
        found = HeadFile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] == ("schema_version",):
            reason = f"it is of another version of prefill (schema_version is not {SCHEMA_VERSION})"
        elif first["type"] in ("missing", "json_invalid") or first["loc"] in {(), ("kind",)}:
            reason = "it is not a file of prefill fit, or it is damaged"
        else:
            reason = f"it is damaged: {where + ': ' if where else ''}{first['msg']}"
        raise UsageError(f"{shown}: {reason}\n{_AGAIN}") from None
    if not sealed:
        raise UsageError(f"{shown}: it has no checksum: another program wrote it\n{_AGAIN}")
    return found
