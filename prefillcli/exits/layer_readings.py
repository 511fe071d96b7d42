"""What a layer before the last shows of rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Readings:
    """What some rows show after a layer, at the last token of each prompt.

    `hidden` is the residual stream, float32 [rows, hidden]. `logits` are the labels' logits when the model's own norm
    and head read it, float64 [rows, labels], with the variants of a label summed in probability; `before` are those of
    the layer's input.
    """

    hidden: Float32Array
    logits: Float64Array
    before: Float64Array

    def row(self, number: int) -> Readings:
        """Those of one of the rows, by itself."""
        own = slice(number, number + 1)
        return Readings(self.hidden[own].copy(), self.logits[own].copy(), self.before[own].copy())
