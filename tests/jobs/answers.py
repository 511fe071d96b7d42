"""What the columns with the answer to a question must say, by the probability of each of its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.jobs.jobs import TOLERANCE


def confidence_of(shares: Sequence[float], *, scale: bool = False) -> float:
    """By the formulas that the APIs of typed decisions document, for a choice or the level of a scale."""
    count = len(shares)
    if not scale:
        return (max(shares) - 1 / count) / (1 - 1 / count)
    likeliest = max(range(count), key=shares.__getitem__)
    spread = sum(share * abs(at - likeliest) for at, share in enumerate(shares))
    even = sum(abs(at - (count - 1) / 2) for at in range(count)) / count
    return max(0.0, 1 - spread / even)


def assert_answer(
    row: dict[str, Any],
    name: str,
    probabilities: dict[str, float],
    values: Sequence[float] = (),
    tolerance: float = TOLERANCE,
) -> None:
    """The row answers the question with these probabilities of its labels over the whole vocabulary."""
    mass = sum(probabilities.values())
    shares = {label: each / mass for label, each in probabilities.items()}
    assert abs(row[f"{name}.label_mass"] - mass) < tolerance
    if len(shares) == 2 and not values:
        assert abs(row[name] - next(iter(shares.values()))) < tolerance
        assert not {f"{name}.probabilities", f"{name}.confidence"} & row.keys()
        return
    found = row[f"{name}.probabilities"]
    assert list(found) == list(shares)
    assert all(abs(found[label] - share) < tolerance for label, share in shares.items())
    numbers = list(shares.values())
    if values:
        mean = sum(share * value for share, value in zip(numbers, values, strict=True))
        assert abs(row[name] - mean) < tolerance * max(map(abs, values))
    else:
        assert row[name] == max(shares, key=shares.__getitem__)
    assert abs(row[f"{name}.confidence"] - confidence_of(numbers, scale=bool(values))) < 10 * tolerance


def assert_unasked(row: dict[str, Any], name: str) -> None:
    """The row has no answer to the question."""
    own = [key for key in row if key.partition(".")[0] == name]
    assert own
    assert {row[key] for key in own} == {None}


def shares_of(row: dict[str, Any], name: str, labels: Sequence[str]) -> list[float]:
    """The probability of each of these labels, which are all of the question's, as the row's columns have them."""
    if f"{name}.probabilities" in row:
        return [row[f"{name}.probabilities"][label] for label in labels]
    return [row[name], 1 - row[name]]


def likeliest(row: dict[str, Any], name: str, labels: Sequence[str]) -> str:
    """The likeliest of these labels, as the row's columns have them."""
    shares = shares_of(row, name, labels)
    return labels[shares.index(max(shares))]
