"""How many tokens a pack needs so that reading the weights hides behind arithmetic."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from prefillcli.models.streamed_layers import StreamedLayers

_ROWS = 512
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StreamSpeed:
    """What one pass over streamed weights takes: `read_seconds` for the weights, and `token_seconds` for each token's
    products with them, at the speed of a large product."""

    read_seconds: float
    token_seconds: float

    @property
    def hiding_tokens(self) -> int:
        """Tokens from which on a pass takes longer for arithmetic than for reading."""
        return math.ceil(self.read_seconds / self.token_seconds)


def measure_speed(layers: StreamedLayers) -> StreamSpeed:
    """Read the first layer, and multiply with its largest matrix: takes about as long as one layer of a pack."""
    begun = time.monotonic()
    with layers.use(0) as layer, torch.inference_mode():
        read = time.monotonic() - begun
        matrices = [matrix.flatten(0, -3)[0] if matrix.dim() > 2 else matrix.data for matrix in layer.parameters()]
        weight = max((each for each in matrices if each.dim() == 2), key=torch.Tensor.numel)
        rows = torch.ones((_ROWS, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        product = min(_seconds(rows, weight) for _ in range(_ROUNDS))
    number_seconds = product / (_ROWS * weight.numel())
    return StreamSpeed(
        read_seconds=layers.pass_bytes * read / layers.layer_bytes(0),
        token_seconds=number_seconds * layers.numbers_per_token,
    )


def _seconds(rows: torch.Tensor, weight: torch.Tensor) -> float:
    begun = time.monotonic()
    torch.mm(rows, weight.T)[0, 0].item()  # waits for the device
    return time.monotonic() - begun
