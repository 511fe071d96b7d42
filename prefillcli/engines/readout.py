"""What an engine makes of a model's outputs for a token: a number for each label.

The outputs are logits of the vocabulary, or those of a classification head's classes. The numbers are their
log-probabilities, or values as they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.engines.base import LabelTokens
from prefillcli.models.find import ModelFiles
from prefillcli.models.heads import Activation


def activation_of(files: ModelFiles) -> Activation:
    """What makes numbers of a model's outputs."""
    return "softmax" if files.head is None else files.head.activation


def label_numbers(
    logits: Tensor, rows: list[int], labels: list[LabelTokens], activation: Activation = "softmax"
) -> npt.NDArray[np.float64]:
    """The number of each label, float64 [answers, labels].

    Answer i reads row `rows[i]` of `logits` (float32 [reads, outputs]) for `labels[i]`. With a softmax they are
    log-probabilities over all outputs; those of a label's tokens are summed in probability. Else each label has one
    output.
    """
    total = torch.logsumexp(logits, dim=-1) if activation == "softmax" else torch.zeros(len(logits))
    result = np.empty((len(rows), len(labels[0])), dtype=np.float64)
    for tokens in set(labels):
        answers = [i for i, own in enumerate(labels) if own == tokens]
        at = torch.as_tensor([rows[i] for i in answers], device=logits.device)
        own, before = logits[at], total.to(logits.device)[at].cpu().double()
        for number, ids in enumerate(tokens):
            if activation == "softmax":
                found = torch.logsumexp(own[:, list(ids)].cpu().double(), dim=-1) - before
            else:
                found = _output(own, ids[0], activation)
            result[answers, number] = found.numpy()
    return result


def label_logits(outputs: Tensor, labels: LabelTokens) -> npt.NDArray[np.float64]:
    """Logits of labels that exclude one another, variants summed in probability, float64 [rows, labels].

    `outputs` float32 [rows, tokens] are those of all the labels' tokens, in their order.
    """
    logits = outputs.cpu().double()  # not every device computes in float64
    parts = torch.split(logits, [len(variants) for variants in labels], dim=1)
    found = [torch.logsumexp(part, dim=1) for part in parts]
    for number, ids in enumerate(labels):
        if ids[0] < 0:  # the complement of the output beside it, whose logit is this one's distance to 0
            found[number] = torch.zeros_like(found[number])
    stacked: npt.NDArray[np.float64] = torch.stack(found, dim=1).numpy()
    return stacked


def output_numbers(labels: LabelTokens) -> list[int]:
    """The outputs of a model that labels are read from."""
    return [max(token, ~token) for variants in labels for token in variants]


def _output(logits: Tensor, number: int, activation: Activation) -> Tensor:
    """One output of a head, or for ~number the probability that it is not, float64 [rows]."""
    value = logits[:, max(number, ~number)].cpu().double()
    if activation == "none":
        return value
    return torch.nn.functional.logsigmoid(-value if number < 0 else value)
