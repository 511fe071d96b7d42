"""Heads of sequence classification: the checkpoints that have one, the meaning of the outputs, and their labels.

transformers reads such a head at the last token of a prompt that is not padding. Its outputs become probabilities as
in transformers' text-classification pipeline: by `problem_type`, else a logistic function of a single output, and a
softmax over several ones. The numbers of labels are computed here too, from any model's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from prefillcli.errors import UsageError
from prefillcli.models.files import CLASSIFIER, read_header, weight_files
from prefillcli.plan.behind import LabelTokens
from prefillcli.prompts.labels import ClassLabels, complementary, parse_labels
from prefillcli.prompts.questions import Label
from prefillcli.rows.records import NextTokens
from prefillcli.stats.labels import Measure
from prefillcli.walk.forest import UnsupportedModelError

# The outputs to read of a model: by its configuration, the next token, or a head's probabilities or values.
HeadChoice = Literal["auto", "vocabulary", "probability", "value"]
# The kind of function from a model's outputs to numbers: log-probabilities, of all outputs or of each by itself, or
# none; or the scores of a pointer head.
Activation = Literal["softmax", "sigmoid", "none", "pointer"]

_WEIGHT = "score.weight"
_OTHERS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "RewardModel")
_MOST_NAMED = 12  # classes, in a message


@dataclass(frozen=True, slots=True)
class ClassHead:
    """A head of sequence classification: the names of its outputs, and the function that turns them into numbers."""

    classes: tuple[str, ...]
    activation: Activation
    padding: int | None  # the token that the model takes for padding at a prompt's end


def find_head(folder: Path, config: Any, choice: HeadChoice, *, multimodal: bool = False) -> ClassHead | None:
    """Find the head that is read of a checkpoint in a folder, by its transformers configuration and `--head`; None
    for the vocabulary's.

    Raises UnsupportedModelError for heads that are not supported, and UsageError where a required head is missing.
    """
    names = config.architectures or []
    if choice == "vocabulary":
        return None
    if choice == "auto" and not any(name.endswith(CLASSIFIER) for name in names):
        if other := next((name for name in names if name.endswith(_OTHERS)), None):
            raise UnsupportedModelError(
                f"{folder}: {other} has a head that is not read: only those of causal language models and "
                f"*{CLASSIFIER} are\ngive --head vocabulary to score its next token, if it has one"
            )
        return None
    if multimodal:
        raise UnsupportedModelError(f"{folder}: of a {config.model_type}, the text model has no classification head")
    own_code = CLASSIFIER in str(getattr(config, "auto_map", ""))
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not own_code:
        raise UnsupportedModelError(f"{folder}: transformers has no classification head for {config.model_type}")
    if not any(name.endswith(CLASSIFIER) for name in names) and not any(
        _WEIGHT in read_header(path) for path in weight_files(folder)
    ):
        raise UsageError(
            f"--head {choice}: {folder} has no classification head: there is no tensor {_WEIGHT}\nleave --head out"
        )
    text = config.get_text_config()
    return ClassHead(_class_names(config), _activation(config, choice), getattr(text, "pad_token_id", None))


def auto_class(head: ClassHead | None) -> Any:
    """Return the class of transformers that loads a model with this head."""
    return AutoModelForCausalLM if head is None else AutoModelForSequenceClassification


def class_labels(head: ClassHead, labels: str | Sequence[str] | None) -> ClassLabels:
    """Return the labels of a job that reads a head: those of `--labels`, else all of its classes. Raises
    UsageError."""
    given = None if labels is None else parse_labels(labels, least=1)
    if len(head.classes) == 1:
        return _of_one_output(head, given)
    return _of_classes(head, given)


def _of_one_output(head: ClassHead, given: Sequence[Label] | None) -> ClassLabels:
    # For a head with a single output. Its labels may have any names: one, and one for its complement.
    value = head.activation == "none"
    named = list(given or (Label(head.classes[0]),))
    if len(named) > (1 if value else 2):
        names = ", ".join(label.name for label in named)
        most = "one value, which has one name" if value else "one output: it and its complement have two names"
        raise UsageError(f"--labels {names}: the model's head gives {most}\nleave --labels out")
    if value:
        return ClassLabels(named, ((0,),), Measure.VALUES)
    return _with_complement(0, named)


def _of_classes(head: ClassHead, given: Sequence[Label] | None) -> ClassLabels:
    own = [Label(name, _spelling(number, head.classes)) for number, name in enumerate(head.classes)]
    exclusive = head.activation == "softmax"
    if given is None:
        chosen = list(range(len(own)))
        if len(own) == 2 and head.activation != "sigmoid":
            chosen = [1, 0]  # of two classes, the second is the positive one
    else:
        chosen = [_number_of(label, head.classes) for label in given]
        spelt = {number: label for number, label in zip(chosen, given, strict=True) if label.variants}
        own = [spelt.get(number, label) for number, label in enumerate(own)]
    if len(chosen) == 1 and head.activation == "sigmoid":
        return _with_complement(chosen[0], [own[chosen[0]]])
    if len(chosen) == 1 and exclusive:
        chosen += [number for number in range(len(own)) if number != chosen[0]]
    measure = {"softmax": Measure.SHARES, "sigmoid": Measure.CHANCES, "none": Measure.VALUES}[head.activation]
    return ClassLabels([own[number] for number in chosen], tuple((number,) for number in chosen), measure)


def _with_complement(number: int, named: Sequence[Label]) -> ClassLabels:
    # A class that is right or not, and its complement, whose output has the complement of its number.
    labels = complementary(*named)
    found: LabelTokens = ((number,), (~number,))
    return ClassLabels(labels, found, Measure.SHARES)


def _number_of(label: Label, classes: Sequence[str]) -> int:
    if label.name in classes:
        return classes.index(label.name)
    shown = ", ".join(classes[:_MOST_NAMED]) + (
        f" and {len(classes) - _MOST_NAMED} more" * (len(classes) > _MOST_NAMED)
    )
    raise UsageError(f"--labels: {label.name!r} is not a class of the model\nits classes are {shown}")


def _spelling(number: int, classes: Sequence[str]) -> tuple[str, ...] | None:
    # A class's number as a spelling of right answers, unless some class has a number for a name.
    return None if any(name.lstrip("-").isdigit() for name in classes) else (str(number),)


def _class_names(config: Any) -> tuple[str, ...]:
    count = int(config.num_labels)
    names = {int(number): str(name).strip() for number, name in (config.id2label or {}).items()}
    found = tuple(names.get(number) or f"LABEL_{number}" for number in range(count))
    return found if len(set(found)) == count else tuple(f"LABEL_{number}" for number in range(count))


def _activation(config: Any, choice: HeadChoice) -> Activation:
    # As transformers' text-classification pipeline chooses it, unless `--head` does.
    kind = getattr(config, "problem_type", None)
    if choice == "value" or (choice == "auto" and kind == "regression"):
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or config.num_labels == 1 else "softmax"


# From a model's outputs for a token to a number for each label.
#
# The outputs are logits of the vocabulary, or those of a classification head's classes. The numbers are their
# log-probabilities, or values as they are.


def label_numbers(
    logits: Tensor, rows: list[int], labels: list[LabelTokens], activation: Activation = "softmax"
) -> list[npt.NDArray[np.float64]]:
    """Return for each answer the number of each label, float64 [labels].

    Answer i reads row `rows[i]` of `logits` (float32 [reads, outputs]) for `labels[i]`. With a softmax they are
    log-probabilities over all outputs; those of a label's tokens are summed in probability. Otherwise each label has
    one output.
    """
    total = torch.logsumexp(logits, dim=-1) if activation == "softmax" else torch.zeros(len(logits))
    result = [np.empty(len(own)) for own in labels]
    for tokens in set(labels):
        answers = [i for i, own in enumerate(labels) if own == tokens]
        at = torch.as_tensor([rows[i] for i in answers], device=logits.device)
        own, before = logits[at], total.to(logits.device)[at].cpu().double()
        numbers = np.empty((len(answers), len(tokens)))
        for number, ids in enumerate(tokens):
            if activation == "softmax":
                found = torch.logsumexp(own[:, list(ids)].cpu().double(), dim=-1) - before
            else:
                found = _output(own, ids[0], activation)
            numbers[:, number] = found.numpy()
        for answer, each in zip(answers, numbers, strict=True):
            result[answer] = each
    return result


def pointer_numbers(outputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of options, float64 [options], from the `outputs` of a pointer head [options + 1,
    width] at each of them and at the end of the prompt. The first half of these is a query, the second a key, whose
    product is scaled as in attention (llama.cpp, tools/server/server-context.cpp)."""
    queries, keys = np.split(outputs, 2, axis=1)
    scores = keys[:-1] @ queries[-1] / math.sqrt(keys.shape[1])
    found: npt.NDArray[np.float64] = scores - np.logaddexp.reduce(scores)
    return found


def likeliest_tokens(
    logits: Tensor, rows: list[int], count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the likeliest tokens by these rows of `logits` (float32 [reads, vocabulary]), the likeliest first, and of
    equal ones that with the lowest id first: int64 [rows, count]; and their log-probabilities, float64 [rows,
    count]."""
    own = logits[torch.as_tensor(rows, device=logits.device)]
    top, tokens = own.topk(count, dim=-1)
    # The log-sum-exp less its largest term, which float32 holds more exactly than the whole.
    rest = torch.exp(own - top[:, :1]).sum(dim=-1, keepdim=True).cpu().double().log()
    numbers = (top.cpu().double() - top[:, :1].cpu().double() - rest).numpy()
    ids = tokens.cpu().numpy()
    order = np.lexsort((ids, -numbers), axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(numbers, order, -1)


def next_tokens(logits: Tensor, rows: list[int], labels: Sequence[LabelTokens], count: int) -> list[NextTokens]:
    """Return what follows the tokens at these rows of `logits` (float32 [reads, vocabulary]): the `count` likeliest
    tokens, and the probability that the next one is among the first tokens of the `labels` of that row."""
    first: list[LabelTokens] = [(tuple(dict.fromkeys(token for own in each for token in own)),) for each in labels]
    begins = label_numbers(logits, rows, first)
    likeliest = likeliest_tokens(logits, rows, min(count, logits.shape[-1]))
    return [
        NextTokens(tokens, numbers, min(math.exp(own[0]), 1.0))
        for tokens, numbers, own in zip(*likeliest, begins, strict=True)
    ]


def label_logits(outputs: Tensor, labels: LabelTokens) -> npt.NDArray[np.float64]:
    """Return the logits of labels that exclude one another, variants summed in probability, float64 [rows, labels].

    `outputs` float32 [rows, tokens] are those of all the labels' tokens, in their order.
    """
    logits = outputs.cpu().double()  # not every device computes in float64
    parts = torch.split(logits, [len(variants) for variants in labels], dim=1)
    found = [torch.logsumexp(part, dim=1) for part in parts]
    for number, ids in enumerate(labels):
        if ids[0] < 0:  # the complement: a softmax of x and 0 is the logistic function of x
            found[number] = torch.zeros_like(found[number])
    stacked: npt.NDArray[np.float64] = torch.stack(found, dim=1).numpy()
    return stacked


def output_numbers(labels: LabelTokens) -> list[int]:
    """Return the outputs of a model that labels are read from."""
    return [max(token, ~token) for variants in labels for token in variants]


def _output(logits: Tensor, number: int, activation: Activation) -> Tensor:
    # One output of a head, or for ~number that of its complement, float64 [rows].
    value = logits[:, max(number, ~number)].cpu().double()
    if activation == "none":
        return value
    return torch.nn.functional.logsigmoid(-value if number < 0 else value)
