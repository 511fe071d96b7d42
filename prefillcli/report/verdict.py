"""The verdict on a run in words: whether it went well, and what a person must look at.

The page, the terminal, the last line on stdout and `run.json` show the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel

from prefillcli.errors import counted
from prefillcli.rows.output import ANSWER
from prefillcli.stats.evaluation import Evaluation
from prefillcli.stats.labels import HALF_MASS, UNANSWERED_MASS

if TYPE_CHECKING:
    from prefillcli.report.run import QuestionAnswers, RunReport

ABOUT_ANSWERS = "answers"  # the event of warnings about answers, which the verdict has in its own words
ENOUGH = 20  # rows, from which on a single answer to all of them is remarkable
_LIKELY = 3  # tokens that are named
_TRY = (
    "try a larger model that follows instructions, or an instruction that asks for exactly these answers; "
    "a text or template of the question's own may end where the model would say one of them"
)
CHECK_LAYOUT = "check that the model's files have the type and the template that it was trained with"
_TRY_LABELS = "check the model, that the template asks for the labels, and how --labels spells them"


class Verdict(BaseModel):
    """The outcome of a run, and why."""

    kind: Literal["good", "poor", "bad"]  # green, amber or red on the page
    text: str
    reasons: list[str] = []


class _Finding(NamedTuple):
    """Something that a person must know: a few words for the first line, and sentences."""

    head: str
    reasons: list[str]
    told: bool = False  # whether stderr has it already


def verdict_of(report: RunReport) -> Verdict:
    """Return the verdict on a run, from its report."""
    found = _findings(report) if report.status == "complete" else []
    kind = {"failed": "bad", "interrupted": "poor"}.get(report.status, "good")
    ended_well = report.status == "complete" and not report.exit_code
    text = "complete" if ended_well else f"{report.status}, exit code {report.exit_code}"
    heads = [each.head for each in found]
    if heads:
        text += f", {'but ' if not report.exit_code else ''}{'; '.join(heads)}"
    reasons = [reason for each in found for reason in each.reasons]
    reasons = [*([report.error] if report.error else []), *reasons, *report.warnings]
    if report.warnings and not heads:
        text += f", with {counted(len(report.warnings), 'warning')}"
    poor = kind == "good" and (heads or report.warnings or report.exit_code)
    return Verdict.model_validate({"kind": "poor" if poor else kind, "text": text, "reasons": reasons})


def untold(report: RunReport) -> Iterator[str]:
    """Yield what the verdict says and stderr has not said yet."""
    if report.status == "complete":
        yield from (reason for each in _findings(report) if not each.told for reason in each.reasons)


def share(count: int, rows: int) -> str:
    """Return a count and its share of the rows: `12 (21 %)`."""
    return f"{count:,} ({100 * count / max(rows, 1):.0f} %)"


def evaluated(report: RunReport, question: str) -> Evaluation | None:
    """Return the evaluation of a question; None without right answers."""
    evaluations = report.findings.get("evaluations")
    found: Evaluation | None = None if evaluations is None else evaluations.root.get(question)
    return found if found is not None and found.rows else None


def mass_text(mass: float) -> str:
    """Return a label mass, with a word where it is small."""
    if mass < UNANSWERED_MASS:
        return f"{mass:.2g}: the model hardly ever gives one of these answers"
    return f"{mass:.2g}" + (": most of the probability is elsewhere" if mass < HALF_MASS else "")


def truth_text(found: Evaluation) -> str:
    """Return how often answers are right, and how often always the same one would be."""
    accuracy, commonest = found.accuracy.value, found.commonest
    if accuracy is None:
        return ""
    said = f"{accuracy:.1%} of {counted(found.rows, 'row')}"
    return said if commonest is None else f"{said}; always {commonest[0]}: {commonest[1]:.1%}"


def _findings(report: RunReport) -> list[_Finding]:
    found = [_unanswered(report), _one_answer(report), _guesses(report), _all_in_doubt(report)]
    return [each for each in found if each is not None]


def _named(names: Mapping[str, Any], report: RunReport) -> str:
    # The questions in a headline.
    if len(names) == len(report.answers):
        return "this question" if len(names) == 1 else "these questions"
    return " and ".join(filter(None, (", ".join([*names][:-1]), [*names][-1])))


def _unanswered(report: RunReport) -> _Finding | None:
    # Questions whose answers have hardly any probability, unless right answers prove that they are of use.
    low = {name: own for name, own in report.answers.items() if _is_unanswered(own, evaluated(report, name))}
    if not low:
        return None
    heard = {each.question or ANSWER: each for each in report.first_answers}
    reasons, told = [], True
    for name, own in low.items():
        text = f"{name}: its answers have {own.label_mass:.2g} of the probability (label mass)"
        if name in heard and (tokens := heard[name].tokens[:_LIKELY]):
            text += "; the model says " + ", ".join(f"{each.name} ({each.percent})" for each in tokens)
        mass = heard[name].label_mass if name in heard else None
        told = told and mass is not None and mass < UNANSWERED_MASS
        reasons.append(text)
    asked = report.asks_questions
    head = f"the model does not answer {_named(low, report) if asked else 'with the labels'}"
    use = report.findings.get("layout")
    laid_out = use is not None and use.type is not None
    return _Finding(head, [*reasons, CHECK_LAYOUT if laid_out else _TRY if asked else _TRY_LABELS], told)


def _is_unanswered(own: QuestionAnswers, evaluation: Evaluation | None) -> bool:
    if own.label_mass is None or own.label_mass >= UNANSWERED_MASS:
        return False
    commonest = None if evaluation is None else evaluation.commonest
    interval = None if evaluation is None else evaluation.accuracy.interval
    return commonest is None or interval is None or interval[0] <= commonest[1]


def _one_answer(report: RunReport) -> _Finding | None:
    same = {name: own for name, own in report.answers.items() if own.rows >= ENOUGH and len(own.answers) == 1}
    if not same:
        return None
    reasons = [
        f"{name}: all {own.rows:,} rows have the answer {next(iter(own.answers))}" for name, own in same.items()
    ]
    return _Finding(f"{_named(same, report)} {'gets' if len(same) == 1 else 'get'} one answer in all rows", reasons)


def _guesses(report: RunReport) -> _Finding | None:
    # Questions whose answers are worth less than a guess.
    reasons: dict[str, list[str]] = {}
    for name in report.answers:
        if (found := evaluated(report, name)) is None:
            continue
        accuracy, area, commonest = found.accuracy.value, found.auc.value, found.commonest
        if accuracy is not None and commonest is not None and accuracy < commonest[1]:
            said = f"{name}: right in {accuracy:.1%} of the rows; always answering {commonest[0]} is right in "
            reasons.setdefault(name, []).append(f"{said}{commonest[1]:.1%}")
        if area is not None and area < 0.5:
            said = f"{name}: AUC {area:.3f}, below 0.5: the probabilities order the rows the wrong way round"
            reasons.setdefault(name, []).append(said)
    if not reasons:
        return None
    verb = "is" if len(reasons) == 1 else "are"
    return _Finding(
        f"{_named(reasons, report)} {verb} answered worse than by a guess",
        [each for own in reasons.values() for each in own],
    )


def _all_in_doubt(report: RunReport) -> _Finding | None:
    review = report.findings.get("review")
    if review is None or not report.rows.scored or review.rows < report.rows.scored:
        return None
    return _Finding("every row is to be reviewed", ["no row has all its answers at or above their floors"])
