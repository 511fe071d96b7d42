"""The options that cannot be combined: an option, another one, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from prefillcli.errors import UsageError
from prefillcli.options.engines import ENGINES
from prefillcli.options.option import Settings, as_typed
from prefillcli.options.settings import JobSettings

OptionText = str
"""An option as the command line has it, `--draft`, or with a value where only that is meant, `--keep auto`."""

WRITTEN = ("labels", "max_flips", "flips_of", "prompt_column")
"""Options whose default is a choice like any other: they are given wherever they are written down."""


class Refused(NamedTuple):
    """Two options that are refused together, `unless` the settings make them fit."""

    option: OptionText
    other: OptionText
    why: str
    remedy: str
    unless: Callable[[Any], bool] = lambda settings: False

    def holds(self, settings: Settings) -> bool:
        """Return whether these settings have both options, and nothing makes them fit."""
        return given(settings, self.option) and given(settings, self.other) and not self.unless(settings)

    def message(self, kind: type[Settings]) -> str:
        """Return the error for settings of a command."""
        first, second = (_typed(kind, text) for text in (self.option, self.other))
        return f"{first} cannot be combined with {second}: {self.why}\n{self.remedy}"


def given(settings: Settings, text: OptionText) -> bool:
    """Return whether these settings of a command have an option, with its value where the text names one."""
    name, value = _parted(text)
    if name not in settings.options():
        return False
    found = settings.value(name)
    if value:
        return str(found) == value
    written = name in WRITTEN and name in settings.given
    return written or found != settings.options()[name].default


def refuse_combinations(settings: JobSettings) -> None:
    """Raise UsageError for the first refused combination that these settings of a command have."""
    for each in REFUSED:
        if each.holds(settings):
            said = each.message(type(settings))
            raise UsageError(said.replace("--questions", "--ask") if settings.asking.asks_once else said)


def reads_images(settings: JobSettings) -> bool:
    """Return whether images in chats and requests are read with these settings; else their rows are errors."""
    sees = "images" in ENGINES[settings.engine.engine].can
    return sees and not any(given(settings, each.other) and not each.unless(settings) for each in _BLIND)


def _parted(text: OptionText) -> tuple[str, str]:
    flag, _, value = text.partition(" ")
    return flag.removeprefix("--").replace("-", "_"), value


def _typed(kind: type[Settings], text: OptionText) -> str:
    name, value = _parted(text)
    return f"{as_typed(kind, name)} {value}".rstrip()


def _refused(
    options: Iterable[OptionText] | OptionText,
    others: Iterable[OptionText] | OptionText,
    why: str,
    remedy: str = "leave one of them out",
    unless: Callable[[Any], bool] = lambda settings: False,
) -> Iterator[Refused]:
    # Each of the options with each of the others.
    first, second = ((each,) if isinstance(each, str) else tuple(each) for each in (options, others))
    for option, other in product(first, second):
        yield Refused(option, other, why, remedy, unless)


def _fits_apart(settings: Any) -> bool:
    # Whether the tokens that are kept of a row follow from the row alone.
    return bool(
        settings.compression.compress_per_row and (settings.compression.paper or not settings.compression.keep_private)
    )


def _no_head_file(settings: Any) -> bool:
    return settings.lm.head_file is None


def _reads_in_full_precision(settings: Any) -> bool:
    return settings.narrow_walk is None


def _computes_so(settings: Any) -> bool:
    # Whether the model itself computes in --compute, as its heads were fitted to it, and nothing is learnt of rows.
    return settings.lm.head_file is not None


def _keeps_auto(settings: Any) -> bool:
    # Whether --max-flips bounds what --keep auto leaves out.
    return bool(settings.compression.keep == "auto")


# Options that score some rows of a job apart from the others.
_APART = ("--shard", "--since", "--retry-errors")
_EXITS = ("--exit", "--first", "--compute")
_LEARNT = ("--exit", "--first", "--max-flips")
_BOUNDED = (*_LEARNT, "--compute")
_RARE = ("--recall", "--precision")
# What is not done with prompts that have images.
_BLIND = (
    *_refused("--image-column", ("--draft", "--keep"), "the tokens of an image are read together"),
    *_refused("--image-column", ("--first", "--compute", *_RARE), "the models that read first read texts alone"),
    *_refused(
        "--image-column",
        ("--adapter", "--adapter-column"),
        "the part of the model that sees would be without adapters",
    ),
    *_refused("--image-column", "--rationale", "texts are written after prompts of text alone"),
    *_refused("--image-column", "--evidence", "sections of texts are weighed, and no images"),
    *_refused("--image-column", "--target-column", "the likelihood of a text is read after prompts of text alone"),
    *_refused("--image-column", "--calibrate-with", "no image is without content"),
    *_refused("--image-column", "--pair-column", "an encoder reads pairs of texts"),
)

REFUSED: tuple[Refused, ...] = (
    # Rows and files.
    *_refused("--resume", "--overwrite", "one continues the output, the other replaces it"),
    *_refused("--estimate", "--limit", "it draws its rows itself, from the whole input"),
    *_refused("--limit", "--sample", "one takes the first rows, the other random ones"),
    *_refused("--retry-errors", ("--overwrite", "--since"), "it keeps this job's rows"),
    *_refused(
        ("--rejects", "--review"),
        "--shard",
        "it is for the rows of the whole output, which prefill merge makes",
        "after the merge, give it to prefill score with --resume and without --shard: only they are written",
    ),
    # Rows apart from the others of their job.
    *_refused(_APART, "--audit", "it draws from all rows", "audit a sample of the rows in a separate job"),
    *_refused(_APART, "--estimate", "it is about all rows of the input"),
    *_refused(
        _APART,
        "--keep auto",
        "it chooses one rate for all rows of a job",
        "choose it in a run over a sample, then give that rate",
    ),
    *_refused(
        _APART,
        "--draft",
        "rows that share a prefix keep the same tokens of it, and some of these rows are not read",
        "give --set compress_per_row=true --set keep_private=false, so that a row's tokens follow from the row alone",
        _fits_apart,
    ),
    *_refused(
        "--shard",
        _BOUNDED,
        "it learns from the rows of the whole job, and bounds their flips together",
        "leave one of them out, or give the --exit-profile of a run over a sample",
        lambda settings: settings.exits.exit_profile is not None or _computes_so(settings),
    ),
    *_refused(
        ("--since", "--retry-errors"),
        _BOUNDED,
        "it learns from the rows of the whole job, and bounds their flips together",
        unless=_computes_so,
    ),
    *_refused(
        _APART,
        "--rationale-limit",
        "it counts the chosen rows of the whole input in their order",
        "leave it out, and choose fewer rows with --rationale-when",
    ),
    *_refused("--since", "--questions", "a row's results depend on all its questions", "score all rows again"),
    *_refused(
        "--format",
        ("--since", "--retry-errors"),
        "its output has no columns of a score",
        "score all rows again",
    ),
    *_refused(
        "--review-below",
        ("--choices-column", "--target-column", "--format"),
        "it compares the probabilities of labels",
    ),
    # The questions.
    *_refused("--choices-column", "--labels", "each row has its own answers"),
    *_refused("--choices-column", "--label-values", "these are numbers of labels, and rows have none in common"),
    *_refused(
        "--choices-column",
        _BOUNDED,
        "exits learn to decide between labels, and rows have none in common",
        unless=_keeps_auto,
    ),
    *_refused(
        "--choices-column",
        ("--calibration", "--calibrate-with"),
        "it fits a number to each label, and rows have none in common; only a temperature fits choices, and "
        "--temperature takes it",
    ),
    *_refused(
        "--ask",
        ("--labels", "--choices-column"),
        "the answer is yes or no, or one of --options or --levels",
        "give --options instead, or a whole prompt with --template",
    ),
    *_refused("--ask", "--label-values", "levels that are numbers stand for themselves", "give --levels 1,2,3"),
    *_refused("--questions", ("--labels", "--choices-column"), "each question has its labels in the file"),
    *_refused("--questions", "--label-values", "a question has its values in the file"),
    *_refused("--options", "--levels", "a question is a choice or a score"),
    *_refused(
        "--ask",
        "--questions",
        "it is one question, and the file has others",
        "put it into the file",
        lambda settings: settings.asking.asks_once,
    ),
    *_refused(
        "--questions",
        _RARE,
        "it is proven for the first of two labels",
        "leave it out, or ask one question with --template and --labels",
    ),
    *_refused(
        "--target-column",
        (
            *("--labels", "--label-norm", "--label-end", "--temperature", "--choices-column", "--label-values"),
            *("--questions", *_BOUNDED, "--exit-profile", "--calibration", "--calibrate-with"),
            *("--rationale", "--evidence", "--truth", "--audit", "--min-label-mass", "--max-drift"),
        ),
        "it needs labels, and the likelihood of a text has none",
    ),
    *_refused(
        "--target-column",
        "--keep auto",
        "the rate is chosen by flips of labels, and there are none",
        "give a rate, like --keep 0.2",
    ),
    *_refused(
        "--format",
        (
            *("--labels", "--label-norm", "--label-end", "--temperature", "--choices-column", "--label-values"),
            *("--questions", "--target-column", *_LEARNT, "--exit-profile", "--calibration", "--rationale"),
            *("--evidence", "--truth", "--audit", "--min-label-mass", "--max-drift", "--keep auto"),
            *("--keep-columns", "--partition", "--template"),
        ),
        "the requests of the input determine what is asked and written",
    ),
    *_refused(
        "--format",
        "--compute",
        "the requests of the input determine what is asked and written",
        unless=_computes_so,
    ),
    # Reading prompts.
    *_refused("--paper", "--draft self", "the paper's draft decodes, and with --draft self nothing is decoded"),
    *_refused(("--first", "--compute"), "--draft", "a job has either first models or a draft"),
    *_refused(
        _EXITS,
        "--keep auto",
        "exits are learnt for one keep rate, which --keep auto has yet to choose",
        "choose the rate in a run without exits, then give it",
    ),
    *_refused(
        _RARE,
        ("--max-flips", "--flips-of", "--exit", "--exit-profile", "--compute", "--estimate"),
        "it is proven for one first model, and replaces the bound on flips",
    ),
    *_refused(
        "--estimate",
        ("--exit", "--exit-rows", "--exit-profile", "--flips-of", "--max-flips", "--audit", *_RARE),
        "the model reads the drawn rows in full",
    ),
    *_refused(
        "--adapter-column",
        (*_EXITS, "--calibrate-with"),
        "it learns from one model, and adapters make several",
        "score each adapter's rows in a separate job",
    ),
    *_refused(
        "--adapter-column",
        "--max-flips",
        "it learns from one model, and adapters make several",
        "score each adapter's rows in a separate job",
        _keeps_auto,
    ),
    *_refused(
        "--exit-profile",
        "--adapter",
        "an exit profile does not say which adapters it was learnt with",
        unless=lambda settings: "exits" in settings.groups(),
    ),
    *_refused(
        "--weights stream",
        "--adapter",
        "an adapter is merged into weights that are loaded whole",
        "take --weights resident, or merge it with PEFT and give the merged model",
    ),
    *_refused(
        "--deterministic",
        ("--draft", "--keep"),
        "which tokens are kept may depend on the rows beside them",
    ),
    *_refused(
        "--deterministic",
        _BOUNDED,
        "exits are learnt from the other rows",
        unless=_computes_so,
    ),
    *_refused(
        "--compute",
        "--deterministic",
        "in low precision a row's numbers may depend on the rows beside it",
        unless=_reads_in_full_precision,
    ),
    *_refused(
        "--compute",
        "--weights stream",
        "the weights in low precision are made once, of weights that are loaded whole",
        "take --weights resident",
        unless=_reads_in_full_precision,
    ),
    *_refused("--deterministic", "--compile", "compiled layers have different kernels for each size of chunk"),
    *_refused(
        "--deterministic",
        "--rationale",
        "the text written for a row is not bitwise reproducible across row positions",
        "leave one of them out; --evidence is covered",
    ),
    # Images.
    *_BLIND,
    *_refused("--image-column", "--format", "requests bring their own images"),
    # Heads of one's own.
    *_refused(
        "--head",
        ("--exit", "--first", "--exit-profile", "--estimate"),
        "exits and first models learn from the model's own answers, and a head answers instead",
        unless=_no_head_file,
    ),
    *_refused(
        "--head",
        ("--draft self", "--keep auto"),
        "it is fitted to what the model reads, and that choice is made by layers or answers that it does without",
        "give a draft and a rate",
        unless=_no_head_file,
    ),
    *_refused(
        "--head",
        "--rationale",
        "the layers that write are above it, and are not read",
        unless=_no_head_file,
    ),
    *_refused(
        "--head",
        ("--calibrate-with", "--label-norm", "--label-end", "--min-label-mass", "--temperature"),
        "its probabilities are fitted to right answers, and are not those of words",
        unless=_no_head_file,
    ),
    *_refused("--head", "--orders", "a head knows one order of the options", unless=_no_head_file),
    *_refused(
        "--head",
        ("--target-column", "--choices-column"),
        "it answers questions whose answers all rows share",
        unless=_no_head_file,
    ),
    # Further questions.
    *_refused(
        "--rationale",
        ("--head probability", "--head value"),
        "the model's classification head is read, which writes nothing",
        "leave it out; --evidence works with a head",
    ),
    *_refused(
        ("--speculation draft", "--speculation hierarchy"),
        "--draft-tokenizer translate",
        "a draft with another tokenizer cannot guess the model's tokens",
        "leave --draft-tokenizer translate out, or give --speculation lookup",
    ),
    # Probabilities.
    *_refused("--calibration", "--calibrate-with", "both make the probability"),
    *_refused(
        "--calibration",
        "--label-norm",
        "a calibration is fitted on log-probabilities of whole labels",
        "leave one of them out; --calibrate-with works with both",
    ),
)
