"""Rationales: how they are written after rows, how they become texts of rows, and their report."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from prefillcli.core.condition import LimitedCondition, RowCondition
from prefillcli.core.further import Condition, Further, RowSelection, WantedRow, first_rows
from prefillcli.core.request import Request, scored_row
from prefillcli.core.roles import FollowUp, Judge
from prefillcli.engines.memory_plan import TEXTS
from prefillcli.errors import UsageError
from prefillcli.followup import evidence
from prefillcli.options.followup import ChosenOptions, WritingOptions
from prefillcli.options.requirements import leaves_early
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.prompts.labels import ClassLabels, Labels
from prefillcli.prompts.templates import OWN_WORDS, Beginnings, rationale_texts
from prefillcli.report.finding import Finding
from prefillcli.report.section import Part, Section, counted, minutes_and_seconds, row_name, visible
from prefillcli.rows.output.columns import Groups, added
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import FULL, Rationale, ScoredRow, Window
from prefillcli.rows.values import id_texts
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Speculation, Writing

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.core.models import Models
    from prefillcli.core.run import Reached, Run
    from prefillcli.engines.base import Answer
    from prefillcli.models.law import TextsOf
    from prefillcli.models.open import Opened
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.tallies import Counts


@dataclass(frozen=True, slots=True)
class WritablePrompt:
    """A prompt that may get a text: how it is read, the source of its noise, and the text's beginning by predicted
    label."""

    request: Request
    key: str
    words: tuple[tuple[int, ...], ...]

    def beginning(self, label: int) -> Beginning:
        """Return the beginning of the text after the prompt when this label is its answer."""
        return Beginning(self.request.tokens, self.words[label], self.key, self.request.positions)


@dataclass(frozen=True, slots=True)
class ChosenByScores:
    """`Continuations` of the prompts of a pack whose scores decide which rows are wanted.

    `window` has only the rows of the `candidates`, with the columns that the choice reads.
    """

    writing: Writing
    choice: RowSelection
    candidates: Mapping[int, WritablePrompt]
    window: Window
    again: bool = False

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        scored = {
            answer.prompt: scored_row(self.candidates[answer.prompt].request, answer)
            for answer in answers
            if answer.prompt in self.candidates
        }
        if not scored:
            return {}
        labels = self.choice.wanted(self.window, list(scored.values()))
        return {
            prompt: self.candidates[prompt].beginning(labels[row.row][0])
            for prompt, row in scored.items()
            if row.row in labels and self.candidates[prompt].words[labels[row.row][0]]
        }

    def of(self, prompts: Collection[int]) -> ChosenByScores:
        own = {prompt: each for prompt, each in self.candidates.items() if prompt in prompts}
        return replace(self, candidates=own, window=self.window.only(each.request.prompt for each in own.values()))


class Rationales(Further):
    """The rationales of a job. The `template` gives the words before them."""

    def __init__(self, writing: Writing, template: str, inputs: Inputs, choice: RowSelection) -> None:
        self._writing, self._choice = writing, choice
        each = inputs.labels.asked
        self._words = [Beginnings(inputs.opened.tokenizer, labels, template) for labels in each]
        self._id_column: str | None = inputs.settings.ids.id_column

    def continuations(self, window: Window, requests: Mapping[int, Request]) -> ChosenByScores | None:
        if self._choice.schema.questions[0].name:  # which are asked is known when all prompts of a row are answered
            return None
        candidates = {number: self._writable(window, request) for number, request in requests.items()}
        part = window.only((request.prompt for request in requests.values()), self._choice.columns)
        return ChosenByScores(self._writing, self._choice, candidates, part)

    def scored(self, row: WantedRow, answer: Answer) -> None:
        if answer.continuation is not None:
            self._take(row, row.request, answer.continuation)

    def lacks(self, row: ScoredRow) -> bool:
        return row.rationale is None

    def requests(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Request]:
        return [request for each in row.parts or (row,) for request in self._of(window, each, limits)]

    def _of(self, window: Window, row: WantedRow, limits: Limits) -> Sequence[Request]:
        # To write about a row, the model also reads the tokens of it that its own layers drop.
        request = row.request if row.request.thinning is None else Request(row.request.prompt)
        if limits.kept_size(request.size, 1) > limits.kept_tokens:
            self._take(row, request, UNREAD)
            return ()

        def take(answer: Answer | None) -> None:
            self._take(row, request, FAILED if answer is None else answer.continuation or UNREAD)

        beginning = self._writable(window, request).beginning(row.label)
        if not beginning.tokens:
            self._take(row, request, FAILED)
            return ()
        prompt = request.prompt
        if limits.switch:  # how it is read depends on the length with its text, not with its labels
            prompt = replace(prompt, labels=LabelSet.behind(beginning.tokens))
        return [replace(request, prompt=prompt, text=(self._writing, beginning), take=take)]

    def _take(self, row: WantedRow, request: Request, written: Continuation) -> None:
        # Give the row a text that was written after a question.
        text = None
        if written.finish_reason in ("stop", "length"):
            words = self._words[request.prompt.part]
            text = words.text(words.tokens(request.prompt.labels, row.label), written.tokens)
        row.scored.rationale = Rationale(
            text=text,
            tokens=len(written.tokens),
            finish_reason=written.finish_reason,
            gap=written.gap,
            source=FULL if request.kept is None else request.method,
        )

    def _writable(self, window: Window, request: Request) -> WritablePrompt:
        prompt = request.prompt
        own = self._words[prompt.part]
        words = tuple(own.tokens(prompt.labels, label) for label in range(len(prompt.labels)))
        key = self._key(window, prompt.row)
        return WritablePrompt(request, f"{key}, {prompt.part}" if prompt.part else key, words)

    def _key(self, window: Window, row: int) -> str:
        # A row's id, so that its text is the same wherever the row stands; else its number.
        if self._id_column is None:
            return str(row)
        one = window.carried[self._id_column].slice(window.place(row), 1)
        (own,) = id_texts(one, json_text=self._choice.schema.json_carried)
        return own


UNREAD = Continuation((), "memory", float("inf"))  # reason for a prompt whose K,V of all layers do not fit
FAILED = Continuation((), "error", float("inf"))


def writing_of(options: WritingOptions, opened: Opened, names: Sequence[str]) -> Writing | None:
    """Return how the texts of a job with labels of these names are written (none: each prompt has its own); None:
    there are no texts. Raises UsageError for a damaged model folder."""
    if not options.rationale:
        return None
    from prefillcli.models.open import stop_tokens  # takes torch along

    texts = rationale_texts(options.rationale_template, names).values()
    words = [len(opened.tokenizer.encode(f" {text}", add_special_tokens=False)) for text in texts]
    return Writing(
        tokens=options.rationale,
        stop_tokens=stop_tokens(opened.files),
        beginning=max(words, default=OWN_WORDS) + 1,
        temperature=options.rationale_temperature,
        seed=options.rationale_seed,
        speculation=Speculation(
            drafter=options.speculation,
            tokens=options.speculation_tokens,
            budget=options.retrieval_budget,
            chunk=options.retrieval_chunk,
        ),
    )


# The report of rationales: their rows, time and tokens.


class DrafterUse(BaseModel):
    """The guesses of a drafter, and how often they were right."""

    rounds: int  # guesses for one row each
    proposed: int  # tokens
    accepted: int  # the guessed tokens that the model chose itself
    acceptance: float | None = None  # accepted over proposed; None where nothing was proposed


class WrittenRow(BaseModel):
    """A row that was written about. All texts are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    prediction: str | None
    rationale: str | None = None
    finish_reason: str | None = None
    source: str | None = None
    evidence: list[dict[str, Any]] | None = None  # of --evidence


class RationaleUse(Finding):
    """Rows and tokens are those of the output; all else is of this run."""

    key: ClassVar[str] = "rationales"
    place: ClassVar[int] = 5

    rows: int = 0  # that are written about
    tokens: int = 0  # of their texts
    evidence_rows: int = 0  # of --evidence
    finish_reasons: dict[str, int] = Field(default_factory=dict)  # rows by why their text ends
    sources: dict[str, int] = Field(default_factory=dict)  # rows by what their text was written from
    kv: str | None = None  # kept while prompts are scored, or read again; None if no plan knows it
    kv_reason: str | None = None
    kv_bytes: int | None = None  # the most that are kept at a time
    speculation: str | None = None  # as it was asked for; None in a merge
    kept_prompts: int = 0  # rows whose K,V were kept while they were scored
    again_prompts: int = 0  # rows that were read once more
    again_tokens: int = 0  # computed for that
    prefill_seconds: float = 0.0  # reading them once more
    decode_seconds: float = 0.0  # writing
    written_tokens: int = 0  # of this run
    passes: int = 0  # steps of the model, over all rows that were written together
    passes_per_token: float | None = None  # steps of the model for one token of a row: 1 without speculation
    drafters: dict[str, DrafterUse] = Field(default_factory=dict)  # by level
    shown: list[WrittenRow] = Field(default_factory=list)  # with --show-text, the first ones

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the sections on evidence and on the texts."""
        return [evidence.section(self), _section(self)]

    @property
    def tokens_per_second(self) -> float | None:
        """Written in this run, while it decoded."""
        return self.written_tokens / self.decode_seconds if self.decode_seconds else None

    @classmethod
    def of(cls, decoded: DecodingReport | None, speculation: str | None) -> RationaleUse:
        """Return the report of texts that all workers have `decoded`; None: nothing was written in this run."""
        if decoded is None:
            return cls(speculation=speculation)
        return cls(
            speculation=speculation,
            kept_prompts=decoded.kept_prompts,
            again_prompts=decoded.again_prompts,
            again_tokens=decoded.prompt_tokens,
            prefill_seconds=decoded.prompt_seconds,
            decode_seconds=decoded.seconds,
            written_tokens=decoded.tokens,
            passes=decoded.passes,
            passes_per_token=decoded.row_passes / decoded.tokens if decoded.tokens else None,
            drafters={
                name: DrafterUse(
                    rounds=each.rounds,
                    proposed=each.proposed,
                    accepted=each.accepted,
                    acceptance=each.accepted / each.proposed if each.proposed else None,
                )
                for name, each in sorted(decoded.drafters.items())
            },
        )

    def take_settled(self, settled: Mapping[str, Any]) -> None:
        """Take over what a job has settled on the K,V after which texts are written."""
        texts = settled.get(TEXTS)
        if texts is not None:
            self.kv, self.kv_reason, self.kv_bytes = texts["kv"], texts["reason"], texts["bytes"]

    def take(self, counts: Counts) -> None:
        """Take over the counts of the output's rows, including those of earlier attempts."""
        found = counts.tallies.rationales
        self.rows, self.tokens, self.evidence_rows = found.rows, found.tokens, counts.tallies.evidence
        self.finish_reasons, self.sources = dict(found.finish_reasons), dict(found.sources)


# The same in a few lines, for the terminal and the page.


def rationale_lines(use: RationaleUse) -> Iterator[tuple[str, str]]:
    """Yield the lines that rationales add to the table of a run: name and text."""
    if use.rows:
        yield "rationales", f"{counted(use.rows, 'row')} of {counted(use.tokens, 'token')}; {_by(use.finish_reasons)}"
        if set(use.sources) != {"full"}:
            yield "written from", _by(use.sources)
    if use.written_tokens:
        yield "writing", _writing(use)
    if use.again_prompts:
        yield (
            "read again",
            f"{counted(use.again_prompts, 'prompt')}, {counted(use.again_tokens, 'token')} in "
            f"{minutes_and_seconds(use.prefill_seconds)}; {use.kept_prompts:,} kept from scoring",
        )
    if use.drafters:
        yield (
            "speculation",
            "; ".join(
                f"{name} {each.accepted:,} of {counted(each.proposed, 'token')} right"
                + ("" if each.acceptance is None else f" ({each.acceptance:.1%})")
                for name, each in use.drafters.items()
            ),
        )


def _writing(use: RationaleUse) -> str:
    text = f"{counted(use.written_tokens, 'token')} in {minutes_and_seconds(use.decode_seconds)}"
    if use.tokens_per_second is not None:
        text += f", {use.tokens_per_second:,.0f} tokens/s"
    if use.passes_per_token is not None:
        text += f", {use.passes_per_token:.2f} passes a token"
    return text


def _by(rows: Mapping[str, int]) -> str:
    most_first = sorted(rows.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{visible(name, line=True)} {number:,}" for name, number in most_first)


# A row's rationale and the evidence beside it, as terminal and page show them. Both are untrusted text.


NO_REASON = "It is not the reason for the score: it is text that the model finds likely after its answer."


def rationale_text(rationale: Rationale, begins: str = "") -> str:
    """Return the text with the words that it continues, or why there is none; safe to show."""
    if rationale.text is None:
        return f"nothing was written ({rationale.finish_reason})"
    return visible(f"{begins} {rationale.text.strip()}".strip())


def rationale_facts(rationale: Rationale) -> str:
    """Return the end of the text and its source, in a line that is safe to show."""
    parts = [counted(rationale.tokens, "token"), f"ended: {rationale.finish_reason}", f"from: {rationale.source}"]
    if math.isfinite(rationale.gap):
        parts.append(f"smallest gap between the two best tokens: {rationale.gap:.3g}")
    return visible("; ".join(parts), line=True)


def _section(use: RationaleUse) -> Section:
    names = ("rows", "tokens", "evidence_rows")
    section = Section(
        title="Rationales",
        lines=list(rationale_lines(use)),
        parts=[Part(note=NO_REASON)] if use.rows else [],
        summary={"rationales": {name: getattr(use, name) for name in names}},
    )
    section.parts += [
        Part(
            title=f"{row_name(row.row, row.id)}: {row.prediction or ''}, score {row.score:.4f}",
            text=row.rationale or "",
            note=f"ended: {row.finish_reason}; from: {row.source}",
        )
        for row in use.shown
        if row.finish_reason is not None
    ]
    section.metric(
        "rationale_rows", "Rows of the output with a rationale by why it ends.", use.finish_reasons, "reason"
    )
    section.metric("rationale_tokens", "Tokens of the output's rationales.", use.tokens)
    section.metric("rationale_decode_seconds", "Seconds in which the last run wrote.", use.decode_seconds)
    section.metric("rationale_prefill_seconds", "Seconds in which it read prompts once more.", use.prefill_seconds)
    if use.passes_per_token is not None:
        section.metric("rationale_passes_per_token", "Passes of the model for one token.", use.passes_per_token)
    accepted = {name: each.acceptance for name, each in use.drafters.items() if each.acceptance is not None}
    section.metric("rationale_acceptance", "Share of the tokens guessed ahead that were right.", accepted, "drafter")
    return section


def inspected(rationale: Rationale, begins: str) -> Section:
    """Return a row's rationale in `prefill inspect`."""
    text = rationale_text(rationale, begins)
    return Section(title="Rationale", parts=[Part(text=text, note=rationale_facts(rationale)), Part(note=NO_REASON)])


def written_rows(output: str, groups: Groups, id_name: str | None) -> list[WrittenRow]:
    """Return the first rows of an output with these columns that are written about or weighed."""
    text = {"rationale": "rationale", "finish_reason": "finish_reason", "rationale_source": "source"}
    names = {**(text if "rationales" in groups else {}), **({"evidence": "evidence"} if "evidence" in groups else {})}
    return [
        WrittenRow.model_validate({names.get(name, name): value for name, value in row.items()})
        for row in first_rows(output, tuple(names), id_name)
    ]


class RationaleFollowUp(FollowUp, Judge):
    """The texts of a job after its rows, and their report, also where evidence alone is asked for. Raises UsageError
    for a wrong template."""

    def __init__(self, options: WritingOptions, chosen: ChosenOptions) -> None:
        self._options, self._chosen = options, chosen
        self.groups = added({"rationales": options.rationale})
        self._shown: Sequence[WrittenRow] = ()
        if chosen.rationale_when is not None:
            RowCondition(chosen.rationale_when)
        if options.rationale:
            self._texts(("Yes", "No"))

    def condition(self, schema: OutputSchema) -> Condition | None:
        chosen = self._chosen
        if chosen.rationale_when is None:
            return None
        return LimitedCondition(RowCondition(chosen.rationale_when), schema, chosen.rationale_limit)

    def require_labels(self, labels: Labels) -> None:
        """Raise UsageError where no text can be written after prompts with these labels."""
        if not self._options.rationale:
            return
        if isinstance(labels, ClassLabels):
            raise UsageError(
                "--rationale: the model's classification head is read, which writes nothing\n"
                "leave it out, or read the next token with --head vocabulary; --evidence works with a head"
            )
        for each in labels.asked:
            self._texts(each.names)

    def further(self, inputs: Inputs, choice: RowSelection) -> Rationales | None:
        writing = _writing_of(inputs.settings, inputs.opened, inputs.labels.names)
        return None if writing is None else Rationales(writing, self._options.rationale_template, inputs, choice)

    def shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        if row.scored.rationale is None:
            return None
        return inspected(row.scored.rationale, self._texts(labels)[labels[row.label]].strip())

    def ended(self, run: Run) -> None:
        if run.settings.evaluation.show_text and not run.inputs.schema.questions[0].name:
            self._shown = written_rows(run.sink.location, run.inputs.rows.groups, run.settings.ids.id_column)

    def reported(self, report: RunReport, reached: Reached) -> None:
        use = RationaleUse.of(
            None if reached.models is None else reached.models.pool.used().decoded,
            self._options.speculation if self._options.rationale else None,
        )
        use.shown = list(self._shown)
        if reached.sink is not None:
            use.take_settled(reached.sink.settled)
            use.take(reached.sink.counts)
        report.add(use)

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        counts = manifest.counts
        if counts is not None and (counts.tallies.rationales.rows or counts.tallies.evidence):
            use = RationaleUse()
            use.take(counts)
            report.add(use)

    def _texts(self, names: Sequence[str]) -> Mapping[str, str]:
        return rationale_texts(self._options.rationale_template, names)


def text_room(settings: JobSettings, opened: Opened, names: Sequence[str]) -> tuple[int, TextsOf]:
    """Return the most tokens of a text after a prompt, and the prompts that get one, for labels with these names; 0
    tokens where no text is written."""
    writing = _writing_of(settings, opened, names) if settings.rationales.rationale else None
    if writing is None:
        return 0, "all"
    later = (
        "chosen" not in settings.groups()  # a command that writes about a row that it has read
        or settings.chosen.rationale_limit is not None
        or settings.asking.questions is not None
        or settings.compression.drafts_itself
        or leaves_early(settings)
    )
    return writing.most_tokens, "later" if later else "all" if settings.chosen.rationale_when is None else "some"


def let_draft_guess(models: Models[Any]) -> None:
    """Let the draft guess tokens of texts, if it is to. Raises UsageError where it cannot."""
    small = models.opened.draft
    settings = models.settings
    if small is None or not settings.rationales.speculates_by_draft:
        return
    from prefillcli.walk.draft_model import DraftModel
    from prefillcli.walk.forest import UnsupportedModelError

    try:
        models.engine.guess_with(
            DraftModel(models.small_walk(chunk_tokens=settings.packs.chunk_tokens), small.max_length)
        )
    except UnsupportedModelError as error:
        raise UsageError(
            f"--speculation {settings.rationales.speculation}: --draft {small.origin} cannot guess tokens: "
            f"{error}\ntake another draft, or --speculation lookup"
        ) from error


def _writing_of(settings: JobSettings, opened: Opened, names: Sequence[str]) -> Writing | None:
    # With several questions each prompt has its own labels.
    return writing_of(settings.rationales, opened, () if settings.asking.questions is not None else names)
