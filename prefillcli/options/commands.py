"""All options of `prefill score`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from prefillcli.engines.registry import ENGINES, Capability, refuse, refuse_of_encoder
from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.asking import (
    AskOptions,
    BatchInput,
    BatchOptions,
    ChoiceOptions,
    LikelihoodOptions,
    PairOptions,
    ValueOptions,
)
from prefillcli.options.combinations import refuse_combinations
from prefillcli.options.followup import EvidenceOptions, RationaleOptions, WritingOptions
from prefillcli.options.groups import (
    QUOTED,
    BudgetOptions,
    DraftOptions,
    EndingOptions,
    EngineName,
    InputOptions,
    JobOptions,
    KeyValues,
    LogOptions,
    MeasuringOptions,
    MemoryOptions,
    ModelOptions,
    NameList,
    PlacementOptions,
    PriceOptions,
    PromptOptions,
    RunOptions,
    ShardName,
    WordList,
    WorkerOptions,
)
from prefillcli.options.judging import (
    CalibrateSettings,
    EstimateOptions,
    EvaluationOptions,
    GateOptions,
    ProbabilityOptions,
    RejectsOptions,
    ReviewOptions,
)
from prefillcli.options.option import (
    BENCH,
    EARLY_EXIT,
    FILES,
    MODEL,
    PROFILE,
    RUN,
    Settings,
    argument,
    as_typed,
    details_of,
    option,
    require,
)
from prefillcli.options.reading import (
    AdapterOptions,
    BenchOptions,
    CompressionOptions,
    DeterminismOptions,
    EarlierOptions,
    ExitMethodOptions,
    ExitOptions,
    ExitProfileOptions,
    InspectOptions,
    ProfileOptions,
    StreamingOptions,
)
from prefillcli.options.requirements import Requirement
from prefillcli.rows.output import FILE_ENDINGS, Shard

PIPE = "-"  # stdin as INPUT, stdout as output


class ScoreSettings(
    StreamingOptions,
    AdapterOptions,
    RejectsOptions,
    ReviewOptions,
    PairOptions,
    BatchOptions,
    EvaluationOptions,
    EstimateOptions,
    ExitOptions,
    CompressionOptions,
    ProbabilityOptions,
    GateOptions,
    EarlierOptions,
    DeterminismOptions,
    RationaleOptions,
    ValueOptions,
    EvidenceOptions,
    ChoiceOptions,
    AskOptions,
    LikelihoodOptions,
    EndingOptions,
    WorkerOptions,
    PriceOptions,
    LogOptions,
    RunOptions,
    PlacementOptions,
    JobOptions,
):
    """All options of `prefill score`."""

    output: str | None = option(
        None,
        f"Where the scores go: {', '.join(FILE_ENDINGS)}, a folder (ending in /), or - for stdout. "
        "(default: INPUT.scores.parquet; of stdin, stdout)",
        FILES, level="first", changes="files", short="-o", metavar="PATH", path="output",
    )  # fmt: skip
    id_column: str | None = option(
        None,
        "Column that names a row in the output. (default: the row number)",
        FILES, level="first", changes="columns", metavar="NAME",
    )  # fmt: skip
    keep_columns: NameList = option(
        (),
        "Input columns to copy to the output, comma-separated. * stands for all. " + QUOTED,
        FILES,
        level="first",
        changes="columns",
        metavar="NAMES",
    )
    partition: bool = option(
        False, "Write the scores into folders named as in the input, e.g. day=2026-01-01/.", FILES, changes="columns"
    )
    shard: ShardName | None = option(
        None,
        "Score only the I-th of N shares of the rows, e.g. one on each machine; prefill merge joins them.",
        FILES, changes="files", metavar="I/N",
    )  # fmt: skip
    resume: bool = option(False, "Continue this job where it stopped.", FILES, level="first", changes="files")

    engine: EngineName = option(
        "torch",
        "What runs the model: the layer walk, a plain transformers loop, or vLLM.",
        MODEL, changes="scores", metavar="|".join(ENGINES),
    )  # fmt: skip
    engine_options: KeyValues = option(
        {},
        "Option passed to the engine unchanged; repeatable; a mapping in a recipe.",
        MODEL, changes="scores", metavar="KEY=VALUE", repeatable=True, needs="options",
    )  # fmt: skip

    show_text: bool = option(
        False,
        "Put the text of the rows that the report names, and a few rationales, into the report. Otherwise it holds "
        "no text, and its page one prompt of each question.",
        "Evaluation", changes="report", requires=requirements.SHOWN_TEXT,
    )  # fmt: skip

    max_flips: float = option(
        0.01,
        "Share of answers that --exit, --first or --keep auto may flip, at 95 % confidence; of each answer with the "
        "first two.",
        EARLY_EXIT, changes="scores", metavar="RATE", requires=requirements.BOUNDED_FLIPS, gt=0, lt=1,
    )  # fmt: skip
    audit: int = option(
        0,
        "Also read N random rows in full, of those that are compressed or may leave early, and report how many "
        "answers flip.",
        EARLY_EXIT, changes="columns", metavar="N", needs="compression", requires=requirements.AUDITABLE, off=0, ge=0,
    )  # fmt: skip

    dry_run: bool = option(
        False,
        "Read, tokenise and plan only: lengths, sharing, packs, predicted time. No weights are loaded.",
        RUN, level="first", changes="report", needs="forecast",
    )  # fmt: skip
    profile: str | None = option(
        None,
        "Profile written by prefill profile, to predict times. (default: profile.json, if it exists and fits)",
        RUN, changes="speed", metavar="PATH", path="file", needs="forecast",
    )  # fmt: skip

    @property
    def computes_here(self) -> bool:
        return "threads" in ENGINES[self.engine].can

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("price_per_hour",), requirements.FORECAST)
        return found

    @property
    def reads_stdin(self) -> bool:
        """True if the rows come from a pipe."""
        return PIPE in self.inputs

    @property
    def writes_stdout(self) -> bool:
        """True if the scores go to a pipe."""
        return self.output == PIPE or (self.output is None and self.reads_stdin)

    @property
    def can_resume(self) -> bool:
        """True if a run that is stopped leaves rows with which another one may go on. A pipe begins anew each time."""
        return not (self.reads_stdin or self.writes_stdout)

    def check(self) -> None:
        self._check_pipes()
        refuse(self.engine, self.engine_needs(), partial(as_typed, type(self)))
        super().check()
        refuse_combinations(self)

    def _check_pipes(self) -> None:
        if self.reads_stdin and len(self.inputs) > 1:
            raise UsageError("INPUT -: stdin is read alone\nput its rows into a file to score it with others")
        if self.can_resume:
            return
        for name in ("resume", "retry_errors", "shard", "partition"):
            if getattr(self, name):
                option = as_typed(type(self), name)
                raise UsageError(f"{option} cannot be combined with -: a pipe begins anew each time\nname files")

    def take_encoder(self, model: object) -> None:
        if self.engine == "vllm":
            raise UsageError("--engine vllm: the model is an encoder\nleave --engine out, or take --engine hf")
        refuse_of_encoder(self.engine_needs(), partial(as_typed, type(self)))

    @property
    def shard_of(self) -> Shard | None:
        """The share of the rows that this run scores; None for all."""
        return None if self.shard is None else Shard.parse(self.shard)

    def engine_needs(self) -> dict[str, Capability]:
        """Return the ability that the engine must have, by the option that needs it: only options that are not at
        their default."""
        found: dict[str, Capability] = {}
        for name, field in type(self).model_fields.items():
            needed = details_of(type(self), name).needs
            if needed and getattr(self, name) != field.default:
                found[name] = needed
        return found


class InspectSettings(
    AskOptions,
    StreamingOptions,
    AdapterOptions,
    BatchInput,
    ExitProfileOptions,
    InspectOptions,
    DeterminismOptions,
    WritingOptions,
    EvidenceOptions,
    RunOptions,
    PlacementOptions,
    JobOptions,
):
    """All options of `prefill inspect`."""

    row: str | None = option(
        None,
        "Number of the row from 0, or with --id-column its id. (default: the first row)",
        FILES,
        level="first",
        changes="rows",
        metavar="ID",
    )
    id_column: str | None = option(
        None,
        "Column that names a row. (default: the row number)",
        FILES,
        level="first",
        changes="columns",
        metavar="NAME",
    )
    question: str | None = option(
        None,
        "Of several questions, the one whose prompt is shown. (default: the first)",
        FILES, changes="rows", metavar="NAME",
    )  # fmt: skip
    format: Literal["openai", "systemone"] | None = option(
        None,
        "Whose requests with typed questions the rows are. (default: as the first row is)",
        FILES, changes="scores", metavar="openai|systemone",
    )  # fmt: skip
    html: str | None = option(
        None,
        "Also write an HTML page to this file.",
        FILES,
        level="first",
        changes="files",
        metavar="PATH",
        path="page",
    )

    def check(self) -> None:
        super().check()
        refuse_combinations(self)


class ProfileSettings(
    ProfileOptions,
    PriceOptions,
    MeasuringOptions,
    JobOptions,
):
    """All options of `prefill profile`."""

    inputs: tuple[str, ...] = argument(
        (),
        "Parquet, JSONL or CSV: files, directories, globs or URLs. Shows what is in it and what scoring it takes.",
        changes="scores", path="rows",
    )  # fmt: skip
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
        FILES, level="first", changes="files", short="-o", metavar="PATH", path="profile",
    )  # fmt: skip

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        of_input: tuple[type[Settings], ...] = (PriceOptions, InputOptions, PromptOptions, DraftOptions, MemoryOptions)
        of_input += (ProfileOptions,)
        names = dict.fromkeys(name for kind in of_input for name in kind.model_fields)
        without = {"inputs", "memory", "chunk_tokens"}  # these are for the measurements too
        require(found, [name for name in names if name not in without], requirements.INPUT)
        return found

    def with_defaults(self) -> ProfileSettings:
        """Return these settings with defaults for options that were not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        if not self.mode:
            left["mode"] = ("full", "chunked", "hybrid") if self.full else ("full", "hybrid")
        if self.confirm_seconds is None:
            left["confirm_seconds"] = 120.0 if self.full else 20.0
        if self.fit_seconds is None:
            left["fit_seconds"] = 60.0 if self.full else 10.0
        return self.model_copy(update=left)

    def check(self) -> None:
        super().check()
        refuse_combinations(self)


QUICK_ROWS = 60  # rows that `prefill bench` compares by default


class BenchSettings(
    AskOptions,
    ExitMethodOptions,
    BenchOptions,
    MeasuringOptions,
    JobOptions,
):
    """All options of `prefill bench`."""

    full: bool = option(
        False,
        "All methods, long prompts, all rows of INPUT: minutes to hours.",
        BENCH, level="first", changes="report",
    )  # fmt: skip
    inputs: tuple[str, ...] = argument(
        (),
        "Parquet, JSONL or CSV: files, directories, globs or URLs. Without it: sample rows.",
        changes="scores",
        path="rows",
    )
    seed: int = option(
        0,
        "Seed for --sample and random selections.",
        FILES, changes="rows", metavar="N", requires=requirements.RANDOM,
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
    truth: str | None = option(
        None,
        "Column of INPUT with the right answer, for accuracy and AUC; of several questions NAME=COLUMN,...",
        BENCH, level="first", changes="report", metavar="COLUMN",
    )  # fmt: skip
    output: str = option(
        "bench.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        FILES, level="first", changes="files", short="-o", metavar="PATH", path="bench",
    )  # fmt: skip

    def with_defaults(self) -> BenchSettings:
        """Return these settings with defaults for options that were not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        if self.limit is None and self.sample is None and not self.full:
            left["limit"] = QUICK_ROWS
        return self.model_copy(update=left)

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
        require(found, (*for_input, *AskOptions.model_fields), requirements.INPUT)
        return found


# All options of `prefill doctor`.


class DoctorSettings(BudgetOptions, ModelOptions):
    """All options of `prefill doctor`."""

    model: str | None = option(
        None,
        "Also show what a run would do with this model: a directory, a GGUF file or a hub name.",
        MODEL, changes="scores", short="-m", metavar="MODEL", path="model",
    )  # fmt: skip
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")


# All options of `prefill merge`.


class MergeSettings(
    GateOptions,
    EndingOptions,
    LogOptions,
):
    """All options of `prefill merge`."""

    output: str = argument(
        ...,
        "The --output that the shards were given: their folders lie beside it.",
        changes="files",
        path="output",
        min_length=1,
    )
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")


# The commands that take options, by name.
COMMANDS: dict[str, type[Settings]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
    "merge": MergeSettings,
    "doctor": DoctorSettings,
    "calibrate": CalibrateSettings,
}
