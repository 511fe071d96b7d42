"""Training batches: histories that grow with the model's accuracy, each followed by many questions.

A model of this size never leaves chance on long histories. It first learns on drills: a bare list of
words and questions about them, which end as the questions about histories do. Then come histories of
one line, which grow as the model masters them; half of the batches stay below the current length, or
short histories are forgotten.
"""

from dataclasses import dataclass
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.needles import TOPICS, Case
from benchmarks.sample_text import CASES, CREDITORS, SUBJECTS, ask_fairly
from training.sample_tokenizer import answer_tokens

WORDS = tuple(dict.fromkeys((*TOPICS, *CREDITORS, *SUBJECTS)))
MOST_LINES = 250  # about 4,900 tokens of history
MOST_QUESTIONS = 24
GROWTH = 1.5
MASTERED = 0.93  # running accuracy at which the histories grow
MEMORY = 0.9  # weight of the past in the running accuracy
AFTER_GROWTH = 0.7  # running accuracy to start from at a new length
FIRST_DRILL, LAST_DRILL = 4, 12  # words in a drill's list, at first and at last
LEAST_TOKENS = 4096  # in one batch
SHORT, BARE_SHARE = 8, 0.75  # lines up to which a history is short, how many of those have no head
TEXT_SHARE = 0.125  # of the tokens that are not answers: those that are predicted too
FARTHEST = 8192  # positions that gaps may reach
GAP = 32  # gaps are multiples of this, as where whole chunks of text were dropped


@dataclass(frozen=True)
class Lesson:
    """What the next batch is made of."""

    drill: bool
    length: int  # words of a drill's list, or lines of a history


@dataclass
class Curriculum:
    """How long drills or histories are now."""

    drill: bool = True
    length: float = FIRST_DRILL
    running: float = 0.5
    longest_share: float = 0.5  # of the batches have the current length, the others less
    bend: float = 1.0  # lengths below it are log-uniform; from more than 1 on, more of them are short

    @property
    def complete(self) -> bool:
        """The histories have their full length."""
        return not self.drill and self.length >= MOST_LINES

    def draw(self, rng: Random) -> Lesson:
        """The next batch: the current length, or one below it."""
        if self.drill or rng.random() < self.longest_share:
            return Lesson(self.drill, round(self.length))
        return Lesson(False, max(1, round(self.length ** (rng.random() ** self.bend))))

    def record(self, lesson: Lesson, accuracy: float) -> None:
        """Take in a batch's accuracy; only batches at the current length count."""
        if lesson != Lesson(self.drill, round(self.length)):
            return
        self.running = MEMORY * self.running + (1 - MEMORY) * accuracy
        if self.running < MASTERED or self.complete:
            return
        self.running = AFTER_GROWTH
        if self.drill and self.length >= LAST_DRILL:
            self.drill, self.length = False, 1.0
        else:
            self.length = min(max(self.length * GROWTH, self.length + 0.5), MOST_LINES)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. All tensors are [sequences, tokens]."""

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor  # the next token
    answers: torch.Tensor  # bool: the next token is an answer
    text: torch.Tensor  # bool: the next token is text, and is to be predicted


def gapped_positions(rng: Random, tokens: int) -> list[int]:
    """Rising positions of `tokens` tokens with random gaps between chunks, below `FARTHEST`."""
    chunks = tokens // GAP
    spare = (FARTHEST - tokens) // GAP
    if chunks < 1 or spare < 1:
        return list(range(tokens))
    room = rng.randint(0, min(spare, 4 * chunks))
    skips = [0] * (chunks + 1)
    for _ in range(room):
        skips[rng.randint(1, chunks)] += GAP
    positions, skipped = [], 0
    for index in range(tokens):
        if index % GAP == 0:
            skipped += skips[index // GAP]
        positions.append(index + skipped)
    return positions


class BatchMaker:
    """Turns cases into batches for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rng: Random, least_tokens: int = LEAST_TOKENS):
        self._tokenizer = tokenizer
        self._rng = rng
        self._least_tokens = least_tokens
        self._newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
        self._answers = dict(zip(("Yes", "No"), answer_tokens(tokenizer), strict=True))

    def make(self, lesson: Lesson, gaps: bool = False) -> Batch:
        """A batch of one lesson; with `gaps`, positions rise in random jumps."""
        sequences: list[tuple[list[int], set[int]]] = []
        tokens = 0
        while tokens < self._least_tokens:
            ids, answered = self._drill(lesson.length) if lesson.drill else self._history(lesson.length)
            sequences.append((ids, answered))
            tokens += len(ids)
        return self._batch(sequences, gaps)

    def _batch(self, sequences: list[tuple[list[int], set[int]]], gaps: bool) -> Batch:
        shape = len(sequences), max(len(ids) for ids, _ in sequences)
        ids_, positions = torch.zeros(shape, dtype=torch.long), torch.arange(shape[1]).repeat(shape[0], 1)
        answers, text = torch.zeros(shape, dtype=torch.bool), torch.rand(shape) < TEXT_SHARE
        for row, (ids, answered) in enumerate(sequences):
            ids_[row, : len(ids)] = torch.tensor(ids)
            text[row, len(ids) - 1 :] = False
            answers[row, sorted(answered)] = True
            if gaps:
                positions[row] = torch.tensor(gapped_positions(self._rng, shape[1]))
        return Batch(ids_, positions, ids_.roll(-1, dims=1), answers, text & ~answers)

    def _case(self, lines: int) -> Case:
        rng = self._rng
        # a labeling row has one to three sentences, so it comes with the short histories only
        domains = list(CASES) if lines <= 8 else [d for d in CASES if d != "labeling"]
        domain = rng.choice(domains)
        return CASES[domain](rng, min(lines, rng.randint(1, 3)) if domain == "labeling" else lines)

    def _history(self, lines: int) -> tuple[list[int], set[int]]:
        """Token ids of a history with its questions, and the indices that predict an answer."""
        case = self._case(lines)
        # most short histories come without their head: more answers per token while learning begins
        bare = len(case.lines) <= SHORT and self._rng.random() < BARE_SHARE
        ids = self._tokenizer(case.history if bare else case.prefix)["input_ids"]
        # few questions about short histories: sequences of one batch have similar lengths
        most = min(MOST_QUESTIONS, len(case.present) * 3 // 2 + 1)
        asked = [(q.text, q.answer) for q in ask_fairly(self._rng, case, most)]
        return self._append(ids, asked)

    def _drill(self, words: int) -> tuple[list[int], set[int]]:
        """Like `_history`, for a list of words such as "tennis, chess" and bare questions about them."""
        drawn = self._rng.sample(WORDS, 2 * words + 1)
        present, absent = drawn[:words], drawn[words:]
        case = Case("drill", "words", "", "", (f" {', '.join(present)}",), tuple(present), tuple(absent))
        asked = ask_fairly(self._rng, case, words * 3 // 2 + 1)
        return self._append(self._tokenizer(case.history)["input_ids"], [(q.text, q.answer) for q in asked])

    def _append(self, ids: list[int], asked: list[tuple[str, str]]) -> tuple[list[int], set[int]]:
        ids, answered = list(ids), set()
        for question, answer in asked:
            ids += self._tokenizer(question, add_special_tokens=False)["input_ids"]
            answered.add(len(ids) - 1)
            ids += [self._answers[answer], *self._newline]
        return ids, answered
