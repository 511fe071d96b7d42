"""Bodies of requests for typed decisions, drawn at random, and probabilities that answer them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

Body = dict[str, Any]
Probabilities = list[list[float]]

CHARACTERS = st.characters(codec="utf-8")
TEXTS = st.text(CHARACTERS, max_size=30)
# Few words of several scripts, so that texts are often equal.
WORDS = st.sampled_from(
    ["late", "Is it late?", "환불 요청", "🙂 ok", 'a "quoted" one', "two\nlines", "true", "é", "e\u0301"]
)
FULL_TEXTS = st.one_of(WORDS, TEXTS.filter(lambda text: bool(text.strip())))
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3)
# What System One takes where it takes a text.
CONTENTS = st.one_of(FULL_TEXTS, OBJECTS, st.lists(VALUES, min_size=1, max_size=3))
SIZES = st.one_of(st.integers(2, 6), st.sampled_from([2, 10, 26, 27, 255]))


def _parts(kinds: dict[str, tuple[str, st.SearchStrategy[Any]]]) -> st.SearchStrategy[Any]:
    # A text, or a list of parts: by their type the key of their content, and what it may be.
    made = [st.fixed_dictionaries({"type": st.just(kind), key: value}) for kind, (key, value) in kinds.items()]
    return TEXTS | st.lists(st.one_of(made), max_size=3)


_TEXT = {"input_text": ("text", TEXTS)}
_USER = {**_TEXT, "input_json": ("data", OBJECTS | st.lists(OBJECTS, max_size=2))}
_SAID = {"output_text": ("text", TEXTS), "refusal": ("refusal", TEXTS)}
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just(role), "content": _parts(kinds)}, optional={"type": st.just("message")})
    for role, kinds in {"user": _USER, "system": _TEXT, "developer": _TEXT, "assistant": _SAID}.items()
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Body]:
    """Messages, and calls of both kinds with outputs after them."""
    items = draw(st.lists(MESSAGES, min_size=1, max_size=4))
    for number in range(draw(st.integers(0, 3))):
        kind, key = draw(st.sampled_from([("function_call", "arguments"), ("custom_tool_call", "input")]))
        call = {"call_id": f"call_{number}"}
        items.append({"type": kind, "name": draw(FULL_TEXTS), key: draw(TEXTS)} | call)
        for _ in range(draw(st.integers(0, 2))):
            items.append({"type": f"{kind}_output", "output": draw(_parts(_TEXT))} | call)
    return items


def _distinct(draw: st.DrawFn, size: int) -> list[str]:
    # Texts that differ, the first ones drawn.
    drawn = draw(st.lists(FULL_TEXTS, max_size=min(size, 4), unique=True))
    others = (text for number in itertools.count() if (text := f"option {number}") not in drawn)
    return [*drawn, *itertools.islice(others, size - len(drawn))]


@st.composite
def _openai_question(draw: st.DrawFn) -> Body:
    kind = draw(st.sampled_from(["predicate", "choice", "score"]))
    wanted = FULL_TEXTS | st.lists(
        st.fixed_dictionaries({"type": st.just("input_text"), "text": FULL_TEXTS})
        | st.fixed_dictionaries({"type": st.just("input_json"), "data": OBJECTS}),
        min_size=1,
        max_size=2,
    )
    asked: Body = {"type": kind, "instructions": draw(wanted)}
    if kind == "predicate":
        return asked
    texts = _distinct(draw, draw(SIZES))
    key = "value" if kind == "choice" else "label"
    values: list[str | bool] = list(texts)
    if kind == "choice" and draw(st.booleans()):
        values[:2] = [True, False]
    described = draw(st.sampled_from([None, "what it means", ""]))
    options = [{key: each} | ({} if described is None else {"description": described}) for each in values]
    return asked | {"choices" if kind == "choice" else "levels": options}


@st.composite
def _systemone_question(draw: st.DrawFn) -> Body:
    kind = draw(st.sampled_from(["noul", "choice", "score"]))
    asked: Body = {"type": kind}
    if draw(st.booleans()) or kind == "noul":
        asked["instructions"] = draw(CONTENTS)
    if kind == "noul":
        sides = st.dictionaries(st.sampled_from(["true", "false"]), st.none() | CONTENTS)
        return asked | draw(st.just({}) | st.fixed_dictionaries({"criteria": st.none() | sides}))
    if kind == "choice":
        texts = _distinct(draw, draw(SIZES))
        told = draw(st.none() | CONTENTS)
        return asked | {"criteria": dict.fromkeys(texts, told)}
    levels: list[Any] = _distinct(draw, draw(st.integers(2, 10)))
    if draw(st.booleans()):
        levels[0] = {"label": levels[0]}
    return asked | {"criteria": levels}


COUNTS = st.one_of(st.integers(1, 5), st.sampled_from([1, 40]))
NO_EFFECT = st.fixed_dictionaries({}, optional={"x_trace": VALUES, "user": st.none() | TEXTS, "store": st.booleans()})


@st.composite
def openai_bodies(draw: st.DrawFn, counts: st.SearchStrategy[int] = COUNTS) -> Body:
    """Bodies for OpenAI's API, which it would answer."""
    count = draw(counts)
    pool = draw(st.lists(_openai_question(), min_size=1, max_size=min(count, 5)))
    questions = [dict(pool[number % len(pool)]) for number in range(count)]  # some of them equal
    names = draw(st.lists(FULL_TEXTS, max_size=count, unique=True))
    for question, name in zip(draw(st.permutations(questions)), names, strict=False):
        question["name"] = name
    subject = draw(FULL_TEXTS | conversations())
    return {"model": "judge", "input": subject, "questions": questions} | draw(NO_EFFECT)


@st.composite
def systemone_bodies(draw: st.DrawFn, counts: st.SearchStrategy[int] = COUNTS) -> Body:
    """Bodies for System One, which it would answer."""
    ids = _distinct(draw, draw(counts))
    pool = draw(st.lists(_systemone_question(), min_size=1, max_size=min(len(ids), 5)))
    questions = {name: dict(pool[number % len(pool)]) for number, name in enumerate(ids)}
    return {"model": "judge", "state": draw(CONTENTS), "questions": questions} | draw(NO_EFFECT)


def options_of(question: Body) -> int:
    """The number of options of a question in a body."""
    if question["type"] in ("predicate", "noul"):
        return 2
    return len(question.get("choices") or question.get("levels") or question["criteria"])


def probabilities_for(body: Body, seed: int) -> Probabilities:
    """Probabilities for each question of a body: spread, concentrated, certain or even."""
    random = np.random.default_rng(seed)
    shapes: list[Callable[[int], Any]] = [
        lambda size: random.dirichlet(np.ones(size)),
        lambda size: random.dirichlet(np.full(size, 0.05)),
        lambda size: np.eye(size)[random.integers(size)],
        lambda size: np.full(size, 1 / size),
    ]
    questions = body["questions"]
    listed = questions if isinstance(questions, list) else list(questions.values())
    return [shapes[random.integers(len(shapes))](options_of(each)).tolist() for each in listed]
