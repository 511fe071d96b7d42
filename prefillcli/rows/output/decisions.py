"""Answers to typed questions, in the form of the API that they were asked of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prefillcli.stats.arrays import Float64Array
from prefillcli.stats.confidence import choice_confidence, score_confidence

DECISIONS, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"  # the paths of OpenAI's API and of TypeSafe's


def response_of(
    body: Mapping[str, Any],
    answers: Iterable[Sequence[float]],
    *,
    model: str,
    input_tokens: int,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """Return the response to a valid body: OpenAI's if its questions are a list, System One's if they are an object.

    `answers` are the probabilities [options] of each question, in the order of the body; those of a question for yes
    or no are of yes and no. Nothing is written, so there are no output tokens. `cached_tokens` are those of the input
    that were computed for another prompt already; System One does not tell them.
    """
    questions, usage = body["questions"], {"input_tokens": input_tokens, "output_tokens": 0}
    shares = [np.clip(np.asarray(each, np.float64), 0.0, 1.0) for each in answers]  # one that is rounded may exceed 1
    if isinstance(questions, dict):
        pairs = zip(questions.items(), shares, strict=True)
        return {"model": model, "answers": {name: _mapped(each, own) for (name, each), own in pairs}, "usage": usage}
    details = {
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": cached_tokens},
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens,
    }
    listed = [_listed(each, own) for each, own in zip(questions, shares, strict=True)]
    return {"model": model, "answers": listed, "usage": usage | details}


def first_probability(response: Mapping[str, Any]) -> float:
    """Return the probability of the first option in the first answer of a response: of yes, of the first choice, or of
    the lowest level."""
    answers = response["answers"]
    first: dict[str, Any] = answers[0] if isinstance(answers, list) else next(iter(answers.values()))
    if "probabilities" not in first:
        return float(first["probability"] if "probability" in first else first["noul"])
    options = first["probabilities"]
    return float(options[0]["probability"] if isinstance(options, list) else next(iter(options.values())))


def _listed(asked: Mapping[str, Any], shares: Float64Array) -> dict[str, Any]:
    # OpenAI's answer.
    told = {"type": asked["type"], "name": asked.get("name")}
    if asked["type"] == "predicate":
        return told | {"probability": shares[0].item()}
    if asked["type"] == "choice":
        options = [{"value": each["value"]} for each in asked["choices"]]
        told["choice"] = options[shares.argmax()]["value"]
    else:
        options = [{"value": level, "label": each["label"]} for level, each in enumerate(asked["levels"])]
    pairs = zip(options, shares.tolist(), strict=True)
    return told | _judged(asked, shares) | {"probabilities": [each | {"probability": share} for each, share in pairs]}


def _mapped(asked: Mapping[str, Any], shares: Float64Array) -> dict[str, Any]:
    # System One's answer.
    told: dict[str, Any] = {"type": asked["type"]}
    if asked["type"] == "noul":
        return told | {"noul": shares[0].item()}
    options = criteria = asked["criteria"]
    if asked["type"] == "choice":
        told["choice"] = list(criteria)[shares.argmax()]
    else:
        options = told["legend"] = {str(level): each for level, each in enumerate(criteria)}
    return told | _judged(asked, shares) | {"probabilities": dict(zip(options, shares.tolist(), strict=True))}


def _judged(asked: Mapping[str, Any], shares: Float64Array) -> dict[str, float]:
    if asked["type"] == "choice":
        return {"confidence": choice_confidence(shares).item()}
    return {"score": (shares @ np.arange(len(shares))).item(), "confidence": score_confidence(shares).item()}
