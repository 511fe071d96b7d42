"""All options of `prefill score`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.asking import (
    AnsweredOptions,
    AskOptions,
    ChoiceOptions,
    LikelihoodOptions,
    PairOptions,
    RequestOptions,
)
from prefillcli.options.combinations import refuse_combinations
from prefillcli.options.engines import ENGINES, Capability, refuse, refuse_of_encoder
from prefillcli.options.followup import ChosenOptions, WritingOptions
from prefillcli.options.groups import (
    CONTROLS,
    PIPE,
    BudgetOptions,
    EngineOptions,
    IdOptions,
    ImageOptions,
    InputOptions,
    LayerOptions,
    LogOptions,
    MeasuringOptions,
    MergedOptions,
    ModelOptions,
    OutputOptions,
    PredictionOptions,
    PriceOptions,
    QuietOptions,
    ThumbnailOptions,
    WordList,
    WorkerOptions,
)
from prefillcli.options.judging import (
    EstimateOptions,
    EvaluationOptions,
    FitOptions,
    GateOptions,
    LabelledOptions,
    ProbabilityOptions,
    ReviewOptions,
    TruthOptions,
)
from prefillcli.options.option import (
    BENCH,
    FIT,
    INPUT,
    MODEL,
    OUTPUT,
    PROFILE,
    Options,
    Settings,
    argument,
    as_typed,
    details_of,
    option,
    require,
)
from prefillcli.options.reading import (
    FIRST_METHOD,
    PICKERS,
    AdapterOptions,
    EarlierOptions,
    ExitMethodOptions,
    ExitOptions,
    ExitProfileOptions,
    FlipOptions,
    HeadOptions,
    RateOptions,
    RatesOptions,
)
from prefillcli.options.requirements import Requirement
from prefillcli.options.settings import JobSettings, ModelSettings
from prefillcli.rows.output import format_of
from prefillcli.runtime.extras import require_extra


class ScoreSettings(JobSettings):
    """All options of `prefill score`."""

    layers: LayerOptions
    log: LogOptions
    price: PriceOptions
    prediction: PredictionOptions
    processes: WorkerOptions
    files: OutputOptions
    ids: IdOptions
    likelihood: LikelihoodOptions
    asking: AskOptions
    choices: ChoiceOptions
    rationales: WritingOptions
    chosen: ChosenOptions
    earlier: EarlierOptions
    gates: GateOptions
    probabilities: ProbabilityOptions
    exits: ExitOptions
    flips: FlipOptions
    heads: HeadOptions
    estimate: EstimateOptions
    truth: TruthOptions
    evaluation: EvaluationOptions
    requests: AnsweredOptions
    pairs: PairOptions
    review: ReviewOptions
    thumbnails: ThumbnailOptions
    adapters: AdapterOptions
    engine: EngineOptions

    @classmethod
    def implied(cls, options: dict[str, Any]) -> dict[str, Any]:
        # The rows of an estimate are those of --sample N.
        if options.get("estimate") is not None and options.get("sample") is None:
            return options | {"sample": options["estimate"]}
        return options

    @property
    def computes_here(self) -> bool:
        return "threads" in ENGINES[self.engine.engine].can

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("price_per_hour",), requirements.FORECAST)
        return found

    @property
    def reads_stdin(self) -> bool:
        """True if the rows come from a pipe."""
        return PIPE in self.input.inputs

    @property
    def writes_stdout(self) -> bool:
        """True if the scores go to a pipe."""
        return self.files.output == PIPE or (self.files.output is None and self.reads_stdin)

    @property
    def can_resume(self) -> bool:
        """True if a run that is stopped leaves rows with which another one may go on. A pipe begins anew each time."""
        return not (self.reads_stdin or self.writes_stdout)

    def check(self) -> None:
        self._check_pipes()
        refuse(self.engine.engine, self.engine_needs(), partial(as_typed, type(self)))
        super().check()
        self.compression.check_rate()
        self._check_rare()
        self._check_estimate()
        self._check_format()
        refuse_combinations(self)

    def _check_pipes(self) -> None:
        if self.reads_stdin and len(self.input.inputs) > 1:
            raise UsageError("INPUT -: stdin is read alone\nput its rows into a file to score it with others")
        if self.can_resume:
            return
        for name in ("resume", "retry_errors", "shard", "partition"):
            if self.value(name):
                option = as_typed(type(self), name)
                raise UsageError(f"{option} cannot be combined with -: a pipe begins anew each time\nname files")

    def _check_rare(self) -> None:
        rare = self.exits.rare_option
        if rare is None:
            return
        from prefillcli.prompts.labels import parse_labels

        if len(parse_labels(self.answers.labels)) != 2:
            raise UsageError(
                f"{rare}: a row that does not have the first label must have the other one\nname two --labels"
            )

    def _check_estimate(self) -> None:
        rows = self.estimate.estimate
        if rows is not None and self.input.sample != rows:
            raise UsageError(f"--estimate {rows} draws its rows itself, from the whole input\nleave --sample out")

    def _check_format(self) -> None:
        form = None if self.files.output is None else format_of(self.files.output)
        if self.requests.format is not None and (form is None or form.parquet or form.delimiter):
            raise UsageError(
                f"--format {self.requests.format}: requests are answered in JSON Lines\n"
                "give --output a path that ends in .jsonl"
            )

    def take_encoder(self, model: object) -> None:
        if self.engine.engine == "vllm":
            raise UsageError("--engine vllm: the model is an encoder\nleave --engine out, or take --engine hf")
        refuse_of_encoder(self.engine_needs(), partial(as_typed, type(self)))

    def engine_needs(self) -> dict[str, Capability]:
        """Return the ability that the engine must have, by the option that needs it: only options that are not at
        their default."""
        found: dict[str, Capability] = {}
        for name, field in self.options().items():
            needed = details_of(type(self), name).needs
            if needed and self.value(name) != field.default:
                found[name] = needed
        return found | ({} if self.lm.head_file is None else {"head": "exits"})


class ShownOptions(Options):
    """The row that is shown, and the page."""

    row: str | None = option(
        None,
        "Number of the row from 0, or with --id-column its id. (default: the first row)",
        INPUT,
        level="first",
        changes="rows",
        metavar="ID",
    )
    question: str | None = option(
        None,
        "Of several questions, the one whose prompt is shown. (default: the first)",
        INPUT, changes="rows", metavar="NAME",
    )  # fmt: skip
    html: str | None = option(
        None,
        "Also write an HTML page to this file.",
        OUTPUT,
        level="first",
        changes="files",
        metavar="PATH",
        path="page",
    )


class InspectSettings(JobSettings):
    """All options of `prefill inspect`."""

    compression: RateOptions
    layers: LayerOptions
    rationales: WritingOptions
    exit_profile: ExitProfileOptions
    heads: HeadOptions
    requests: RequestOptions
    adapters: AdapterOptions
    asking: AskOptions
    shown: ShownOptions
    thumbnails: ThumbnailOptions
    ids: IdOptions

    def check(self) -> None:
        super().check()
        if self.compression.keep == "auto":
            raise UsageError("--keep auto is for a whole job: give a rate")
        self.compression.check_rate()
        refuse_combinations(self)


class ProfiledInput(InputOptions):
    """The rows whose cost is predicted, if any."""

    inputs: tuple[str, ...] = argument(
        (),
        "Parquet, JSONL or CSV: files, directories, globs or URLs. Shows what is in it and what scoring it takes.",
        changes="scores", path="rows",
    )  # fmt: skip


class MeasuredOptions(Options):
    """What is measured, for how long, and where the figures go."""

    full: bool = option(
        False,
        "All modes, longer measurements: tens of minutes; hours for a large model.",
        PROFILE, level="first", changes="report",
    )  # fmt: skip
    mode: WordList = option(
        (),
        "Mode to find the longest prompt of: full, chunked or hybrid; repeatable. (default: full and hybrid, with "
        "--full all)",
        PROFILE, level="first", changes="report", metavar="NAME", repeatable=True,
    )  # fmt: skip
    confirm_seconds: float | None = option(
        None,
        "Longest run, as estimated, that may confirm a length; 0: confirm none. (default: 20, with --full 120)",
        PROFILE, level="first", changes="report", metavar="SECONDS", ge=0, allow_inf_nan=False,
    )  # fmt: skip
    fit_seconds: float | None = option(
        None,
        "Approximate time for the packs that the curve of seconds is made of. (default: 10, with --full 60)",
        PROFILE, level="first", changes="report", metavar="SECONDS", gt=0, allow_inf_nan=False,
    )  # fmt: skip
    output: str = option(
        "profile.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        OUTPUT, level="first", changes="files", short="-o", metavar="PATH", path="profile",
    )  # fmt: skip


class ProfileSettings(JobSettings):
    """All options of `prefill profile`."""

    input: ProfiledInput
    compression: RateOptions
    run: MeasuringOptions
    price: PriceOptions
    measured: MeasuredOptions

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        of_input = ("price", "input", "prompts", "images", "answers", "packs", "compression")
        names = [name for name, place in cls.places().items() if place in of_input]
        without = {"inputs", "memory", "chunk_tokens"}  # these are for the measurements too
        require(found, [name for name in names if name not in without], requirements.INPUT)
        return found

    def with_defaults(self) -> ProfileSettings:
        """Return these settings with defaults for options that were not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        full = self.measured.full
        if not self.measured.mode:
            left["mode"] = ("full", "chunked", "hybrid") if full else ("full", "hybrid")
        if self.measured.confirm_seconds is None:
            left["confirm_seconds"] = 120.0 if full else 20.0
        if self.measured.fit_seconds is None:
            left["fit_seconds"] = 60.0 if full else 10.0
        return self.with_options(left)

    def check(self) -> None:
        super().check()
        if self.input.inputs:  # without rows nothing is compressed, and the option is refused for that
            if self.compression.keep == "auto":
                raise UsageError(
                    "--keep auto is for a whole job; with --draft, prefill profile predicts several rates anyway"
                )
            self.compression.check_rate()
        refuse_combinations(self)


QUICK_ROWS = 60  # rows that `prefill bench` compares by default


class ContestInput(InputOptions):
    """The rows that are read by several methods, if any."""

    inputs: tuple[str, ...] = argument(
        (),
        "Parquet, JSONL or CSV: files, directories, globs or URLs. Without it: sample rows.",
        changes="scores",
        path="rows",
    )
    seed: int = option(
        0,
        "Seed for --sample and random selections.",
        INPUT, changes="rows", metavar="N", requires=requirements.RANDOM,
    )  # fmt: skip


class ContestOptions(Options):
    """The methods that are compared, and where the figures go."""

    full: bool = option(
        False,
        "All methods, long prompts, all rows of INPUT: minutes to hours.",
        BENCH, level="first", changes="report",
    )  # fmt: skip
    method: WordList = option(
        (),
        "A method to compare: hf, full, hybrid (always), specprefill, self-draft, random, bm25, "
        "early-exit, first, first-exit, int8 or vllm; repeatable. (default: hf, hybrid and, where there is a draft, "
        "specprefill, or with --draft self self-draft, and random; with --full all but those that let rows leave and "
        "vllm)",
        BENCH, level="first", changes="report", metavar="NAME", repeatable=True,
    )  # fmt: skip
    rounds: int = option(
        3,
        "Timed rounds after one warm-up round; 0: take the times of the warm-up.",
        BENCH, level="first", changes="report", metavar="N", ge=0,
    )  # fmt: skip
    output: str = option(
        "bench.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        OUTPUT, level="first", changes="files", short="-o", metavar="PATH", path="bench",
    )  # fmt: skip


class BenchSettings(JobSettings):
    """All options of `prefill bench`."""

    input: ContestInput
    compression: RatesOptions
    run: MeasuringOptions
    learning: ExitMethodOptions
    asking: AskOptions
    contest: ContestOptions
    truth: TruthOptions

    def with_defaults(self) -> BenchSettings:
        """Return these settings with defaults for options that were not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        rows = self.input
        if rows.limit is None and rows.sample is None and not self.contest.full:
            left["limit"] = QUICK_ROWS
        return self.with_options(left)

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        for_input = (
            "csv_separator",
            "csv_quoting",
            "template",
            "truth",
            "prompt_column",
            "literal",
            "max_row_bytes",
        )
        require(found, (*for_input, *AskOptions.model_fields, *ImageOptions.model_fields), requirements.INPUT)
        return found

    @property
    def uses_draft(self) -> bool:
        draft = self.compression
        opened = self.lm.model is None if draft.draft is None else not draft.drafts_itself
        return opened and any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs == "draft")

    @property
    def counts_votes(self) -> bool:
        return self.uses_draft or self.compares("self-draft")

    @property
    def picks_itself(self) -> bool:
        return any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs == "self")

    @property
    def compresses(self) -> bool:
        return self.uses_draft or any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs != "draft")

    @property
    def is_random(self) -> bool:
        return self.compares("random") or super().is_random

    def compares(self, method: str) -> bool:
        """Return whether a method that drops tokens is compared: if one was named, or by default where there is a
        draft."""
        draft = self.compression
        if self.contest.method:
            return method in self.contest.method
        if draft.drafts_itself and method in PICKERS and PICKERS[method].needs == "draft":
            return False
        quick = ("self-draft" if draft.drafts_itself else "specprefill", "random")
        return (draft.draft is not None or self.lm.model is None) and (self.contest.full or method in quick)

    def check(self) -> None:
        super().check()
        draft = self.compression
        if draft.draft in CONTROLS:
            raise UsageError(f"--draft {draft.draft}: give --method {draft.draft}, beside the draft to compare")
        if not draft.keep:
            raise UsageError("--keep: give a rate above 0 and up to 1")
        for name in self.contest.method:
            if name in PICKERS and PICKERS[name].needs == "draft" and not self.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")
            if name == "bm25":
                require_extra("bm25", "--method bm25")
        if "head" in self.contest.method and self.lm.head_file is None:
            raise UsageError("--method head needs --head: a file of prefill fit")
        if FIRST_METHOD.met(self) and not self.learning.first:
            raise UsageError("--method first needs --first: a small model that reads every row first, or words")


class ExaminedModel(ModelOptions):
    """The model that a run would take, if any."""

    model: str | None = option(
        None,
        "Also show how a run would use this model: a directory, a GGUF file or a hub name.",
        MODEL, changes="scores", short="-m", metavar="MODEL", path="model",
    )  # fmt: skip


class DoctorSettings(ModelSettings):
    """All options of `prefill doctor`."""

    lm: ExaminedModel
    packs: BudgetOptions


class MergeSettings(Settings):
    """All options of `prefill merge`."""

    files: MergedOptions
    gates: GateOptions
    log: LogOptions
    run: QuietOptions

    @property
    def finishes(self) -> bool:
        """True if the run finishes an output of all rows."""
        return True


class HeadFitOptions(Options):
    """How heads are fitted, and where they go."""

    output: str | None = option(
        None,
        "Where the heads go. (default: fitted.head, or the file of --add)",
        OUTPUT, level="first", changes="files", short="-o", metavar="PATH", path="head",
    )  # fmt: skip
    add: str | None = option(
        None,
        "Heads of an earlier fit: the rows of INPUT are added to theirs, and all are solved again. The earlier rows "
        "are not read.",
        FIT, level="first", changes="report", metavar="FILE", path="file", same_as="output",
    )  # fmt: skip
    review_blank: Literal["unseen", "confirmed"] = option(
        "unseen",
        "What a blank right answer in a review file means. confirmed: a person saw the answer and it is right; "
        "unseen: nobody has looked.",
        INPUT, changes="report",
    )  # fmt: skip
    compute: Literal["int8", "fp8"] | None = option(
        None,
        "Let the model compute in low precision; prefill score --head then does so, too. fp8 needs CUDA.",
        FIT, changes="scores", metavar="int8|fp8",
    )  # fmt: skip
    most_layers: int | None = option(
        None,
        "Highest layer that a head may read, counted from 1. (default: the model's last)",
        FIT, level="rare", changes="report", metavar="N", ge=1,
    )  # fmt: skip
    keep_worse: bool = option(
        False,
        "Also write heads that are no better than the model's own answers or the commonest one.",
        FIT, level="rare", changes="files",
    )  # fmt: skip


class FitSettings(JobSettings):
    """All options of `prefill fit`."""

    compression: RateOptions
    layers: LayerOptions
    adapters: AdapterOptions
    asking: AskOptions
    truth: TruthOptions
    fitting: HeadFitOptions

    @property
    def narrow_walk(self) -> Literal["int8", "fp8"] | None:
        return self.fitting.compute

    def check(self) -> None:
        super().check()
        if self.lm.head_file is not None:
            raise UsageError(
                f"--head {self.lm.head_file}: heads are fitted to the model itself\ngive --add to add rows"
            )
        if self.compression.keep == "auto":
            raise UsageError("--keep auto is for a whole job: give a rate")
        self.compression.check_rate()
        refuse_combinations(self)


class CalibrateSettings(Settings):
    """All options of `prefill calibrate`."""

    labelled: LabelledOptions
    fit: FitOptions
    run: QuietOptions

    def check(self) -> None:
        super().check()
        if not self.labelled.judged and self.fit.prior is None:
            raise UsageError(
                "no --truth given: name the column with the right answers, or take out the rows' prior without them, "
                "with --prior rows"
            )


# The commands that take options, by name.
COMMANDS: dict[str, type[Settings]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
    "merge": MergeSettings,
    "doctor": DoctorSettings,
    "calibrate": CalibrateSettings,
    "fit": FitSettings,
}
