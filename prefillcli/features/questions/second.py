"""The second pass: conditional questions are asked of the rows for which their conditions hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from prefillcli.core.further import Further, WantedRow
from prefillcli.core.question import Question, scored_row
from prefillcli.data.output.columns import OutputSchema, ResultRows
from prefillcli.data.rows import ScoredRow, Window
from prefillcli.engines.base import Answer
from prefillcli.plan.pack import Limits
from prefillcli.plan.trie import build_forest, forest_tokens, token_order

# How many rows a condition is taken to hold for, as nobody knows yet. The choice of packs must not depend on answers:
# a job that is resumed repeats them.
SHARE = 0.5


class SecondPass(Further):
    """Asks conditional questions in a second pass over a window where that computes fewer tokens: what they share with
    the other questions is read again, but only for the chosen rows. It is the `Condition` that chooses them.

    `prompts` has the number of the question by the numbers of the prompts that may wait.
    """

    columns: frozenset[str] = frozenset()
    limit = None

    def __init__(self, schema: OutputSchema, prompts: Mapping[int, int]) -> None:
        self.most = len(prompts)
        self._schema = schema
        self._prompts = prompts
        self._waiting: dict[int, dict[int, Question]] = {}  # by row and number of the prompt

    def later(self, window: Window, questions: Sequence[Question]) -> Collection[int]:
        waiting = {number for number, each in enumerate(questions) if each.prompt.part in self._prompts}
        first = _computed([each for number, each in enumerate(questions) if number not in waiting])
        if _computed(questions) - first <= _computed([questions[number] for number in waiting]) * SHARE:
            return ()
        for number in waiting:
            prompt = questions[number].prompt
            self._waiting.setdefault(prompt.row, {})[prompt.part] = questions[number]
        return waiting

    def chosen(self, window: Window, rows: ResultRows) -> Collection[int]:
        """The rows of which questions that wait are asked."""
        holds = {number: self._holding(number, rows) for number in set(self._prompts.values())}
        found = set()
        for each in rows.scored:
            waiting = self._waiting.pop(each.row, {})
            asked = {part: own for part, own in waiting.items() if each.row in holds[self._prompts[part]]}
            if asked:
                self._waiting[each.row] = asked
                found.add(each.row)
        return found

    def questions(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Question]:
        waiting = self._waiting.pop(row.scored.row).values()
        return [replace(each, take=partial(_take, row.scored, each), required=True) for each in waiting]

    def _holding(self, number: int, rows: ResultRows) -> Collection[int]:
        when = self._schema.questions[number].when
        return () if when is None else when(rows)


def _computed(questions: Sequence[Question]) -> int:
    # The tokens that these questions take together.
    prompts = [each.tokens for each in questions]
    behind = sum(each.prompt.labels.tokens for each in questions)
    return forest_tokens(build_forest(prompts, token_order(prompts))) + behind if prompts else 0


def _take(row: ScoredRow, question: Question, answer: Answer | None) -> None:
    # Put the answer to one of its prompts into a row.
    if answer is None:  # the row is an error row, as the question is required
        return
    found, part = scored_row(question, answer), question.prompt.part
    row.parts = (*row.parts[:part], found, *row.parts[part + 1 :])
    row.shared_tokens += found.shared_tokens
    row.computed_tokens += found.computed_tokens
    row.kept_tokens += found.kept_tokens
