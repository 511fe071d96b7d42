"""Early exit: rows leave the model once their answer is decided, as often as a bound on flips allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from prefillcli.core.feature import Feature, Objection, SideFile, json_with
from prefillcli.errors import UsageError
from prefillcli.options.option import BENCH, EARLY_EXIT, Settings, details_of, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import (
        Answer,
        Counts,
        Job,
        Labels,
        LeavingRule,
        LocalModels,
        Manifest,
        Models,
        Opened,
        Opening,
        Outlook,
        Pack,
        PlanEngine,
        Prompt,
        Question,
        Readings,
        RunReport,
        ScoredRow,
        Scorer,
        Section,
        Survey,
        Tick,
        Treatment,
        Window,
    )
    from prefillcli.features.exits.first import FirstModels, Reader
    from prefillcli.features.exits.learning import JobExits
    from prefillcli.features.exits.policy import ExitProfile

EXIT = Requirement(
    lambda s: s.exit or s.chain, "needs --exit, --first or --compute", "give --exit, --first or --compute"
)
METHODS = ("early-exit", "first", "first-exit", "int8")  # of `prefill bench`, that let rows leave
FIRST = Requirement(lambda s: s.first, "needs --first", "give --first")
EXIT_METHOD = Requirement(
    lambda s: any(name in METHODS for name in s.method),
    "needs one of the methods early-exit, first, first-exit and int8",
    "give --method early-exit or int8, or --first and --method first",
)
FIRST_METHOD = Requirement(
    lambda s: "first" in s.method or "first-exit" in s.method,
    "needs the method first or first-exit",
    "give --method first",
)


def _names(value: object) -> object:
    # A recipe or a program may give one name.
    return (value,) if isinstance(value, str) else value


DRAFT_TOO = "{} cannot be combined with --draft: a job has first models or a draft\nleave one out"
FirstNames = Annotated[tuple[str, ...], BeforeValidator(_names)]


class ExitOptions(Settings):
    """Whether rows leave early, and the rule that allows it."""

    exit: bool = option(
        False,
        "Let rows leave the model once their answer is decided. --max-flips bounds how many answers that flips.",
        EARLY_EXIT, changes="scores", needs="exits",
    )  # fmt: skip
    first: FirstNames = option(
        (),
        "A small model that reads every row first: a directory, a GGUF file, the name of a hub model, or words, which "
        "needs no model. --model reads the rows whose answer it cannot foretell; --max-flips bounds how many answers "
        "that flips. Several read one after the other what is still in doubt.",
        EARLY_EXIT, changes="scores", metavar="MODEL|words", path="model", repeatable=True, needs="exits", off=(),
    )  # fmt: skip
    compute: Literal["int8", "fp8"] | None = option(
        None,
        "Let the model read every row in smaller numbers first. It reads again, in --dtype, rows whose answer that "
        "does not foretell; --max-flips bounds how many answers that flips. fp8 is for CUDA.",
        EARLY_EXIT, changes="scores", metavar="int8|fp8", needs="exits",
    )  # fmt: skip
    flips_of: Literal["each", "all"] = option(
        "each",
        "What --max-flips bounds with --exit, --first or --compute: the flips of each answer's rows, or of all rows "
        "together.",
        EARLY_EXIT, changes="scores", requires=EXIT,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows to read in full first, to learn when rows are decided. (default: as many as --max-flips takes, at "
        "most half of the job's rows; with --exit-profile 300)",
        EARLY_EXIT, changes="scores", metavar="N", requires=EXIT, ge=20,
    )  # fmt: skip
    exit_profile: str | None = option(
        None,
        "What an earlier job has learnt (its OUTPUT.exit.json), used again after a check on fresh rows.",
        EARLY_EXIT, changes="scores", metavar="FILE", path="file", requires=EXIT,
    )  # fmt: skip

    recall: float | None = option(
        None,
        "Instead of --max-flips, for a rare answer: least share of the rows that --model would answer with the first "
        "label that keep it, at 95 % confidence. The first model decides others that surely do not have it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip
    precision: float | None = option(
        None,
        "Instead of --max-flips: least share of the rows given the first label that --model would give it too, at "
        "95 % confidence. The first model decides rows that surely have it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip

    @property
    def exit_option(self) -> str:
        """The option that lets rows leave."""
        return self.rare_option or ("--exit" if self.exit else "--first" if self.first else "--compute")

    @property
    def chain(self) -> tuple[str, ...]:
        """What reads rows before the model, in this order: first models, and the model in smaller numbers."""
        return (*self.first, self.narrow) if self.narrow else self.first

    @property
    def narrow(self) -> Literal["int8", "fp8"] | None:
        """The smaller numbers in which the model reads rows first."""
        return self.compute

    @property
    def rare_option(self) -> str | None:
        """--recall or --precision, if one is given."""
        return "--recall" if self.recall is not None else "--precision" if self.precision is not None else None


class ExitProfileOptions(Settings):
    """Which exits a row is held against."""

    exit_profile: str | None = option(
        None,
        "What a job has learnt about early exits (its OUTPUT.exit.json): show where the row would leave.",
        EARLY_EXIT, changes="files", metavar="FILE", path="file",
    )  # fmt: skip


class ExitMethodOptions(Settings):
    """How the methods that let rows leave are learnt."""

    first: FirstNames = option(
        (),
        "A model that decides rows in the methods first and first-exit, as of prefill score --first; repeatable.",
        BENCH, changes="scores", metavar="MODEL|words", path="model", repeatable=True, requires=FIRST_METHOD, off=(),
    )  # fmt: skip
    max_flips: float = option(
        0.01,
        "Share of each answer that the methods early-exit, first, first-exit and int8 may flip, at 95 % confidence.",
        BENCH, changes="scores", metavar="RATE", requires=EXIT_METHOD, gt=0, lt=1,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows that these methods learn from, on which none is compared. (default: as many as --max-flips takes, at "
        "most half of the rows)",
        BENCH, changes="scores", metavar="N", requires=EXIT_METHOD, ge=20,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if FIRST_METHOD.met(self) and not self.first:
            raise UsageError("--method first needs --first: a small model that reads every row first, or words")
        if (self.first or "int8" in cast("Any", self).method) and getattr(self, "draft", None) is not None:
            raise UsageError(DRAFT_TOO.format("--first" if self.first else "--method int8"))


class Exits(Feature):
    """The exits of a job. The key `exits` of its report holds a `report.ExitUse`.

    `inspect` and `bench` have options of their own: a profile whose exits a row is held against, and a method.
    """

    order = 30
    options = {"score": ExitOptions, "inspect": ExitProfileOptions, "bench": ExitMethodOptions}
    columns = ("exits", "label_scores")
    plan_keys = ("exits",)
    keys = {"exits": None}
    side_files = {"exits": SideFile("an exit profile", json_with("label_tokens", "exits"))}
    flips = True
    profile: ExitProfile | None = None
    exits: JobExits | None = None
    readers: list[Reader] | None = None  # for those that ask for a glance

    @classmethod
    def asked(cls, settings: Any) -> bool:
        if not isinstance(settings, ExitOptions):
            return True
        return settings.exit or bool(settings.chain)

    def check(self) -> None:
        settings = self.settings
        if getattr(settings, "chain", ()) and settings.draft is not None:
            raise UsageError(DRAFT_TOO.format("--first" if settings.first else "--compute"))
        if isinstance(settings, ExitOptions) and getattr(settings, "keep", 1) == "auto":
            raise UsageError(
                f"{settings.exit_option}: what is learnt about exits is of one keep rate, and --keep auto has not "
                f"chosen it yet\nchoose the rate in a run without {settings.exit_option}, then give it"
            )
        if isinstance(settings, ExitOptions) and settings.rare_option is not None:
            self._check_rare(settings, settings.rare_option)
        if isinstance(settings, ExitProfileOptions) and settings.exit_profile and getattr(settings, "adapter", None):
            raise UsageError("--exit-profile: it does not say which adapters it is of\nleave it or --adapter out")

    def _check_rare(self, settings: Any, option: str) -> None:
        from prefillcli.data.prompts.labels import parse_labels

        others = {
            "--max-flips": "max_flips" in settings.model_fields_set,
            "--flips-of": "flips_of" in settings.model_fields_set,
            "--exit": settings.exit,
            "--exit-profile": settings.exit_profile is not None,
            "a second --first": len(settings.first) > 1,
            "--compute": settings.compute is not None,
            "--estimate": getattr(settings, "estimate", None) is not None,
        }
        for other in (name for name, given in others.items() if given):
            raise UsageError(
                f"{option} cannot be combined with {other}: it is proven of one first model, in place of a bound on "
                "flips\nleave one out"
            )
        if len(parse_labels(settings.labels)) != 2:
            raise UsageError(
                f"{option}: a row that does not have the first label must have the other one\nname two --labels"
            )

    def joint(self, option: str) -> Objection | None:
        if option == "--shard" and self.settings.exit_profile is not None:
            return None
        return Objection(
            f"{self.settings.exit_option} learns from the rows of the whole job, and bounds their flips together",
            "leave one of them out; for shards, give the --exit-profile of a run over a sample",
        )

    def uneven(self) -> Objection:
        return Objection(
            "what is learnt about exits, and so where a row leaves, depends on the other rows",
            f"leave {self.settings.exit_option} out",
        )

    def between_layers(self) -> bool:
        return True

    def learns(self) -> str | None:
        return self.settings.exit_option if isinstance(self.settings, ExitOptions) else None

    def meaningless(self, labels: Labels) -> list[str]:
        return ["exit", "first", "compute"]

    def writes(self, report: str) -> list[tuple[str, str, str]]:
        from prefillcli.features.exits.policy import exits_path

        if self.settings.exit_profile is not None or self.settings.rare_option is not None:
            return []
        return [("exits", exits_path(report), "what is learnt of exits,")]

    def source_opened(self, opening: Opening) -> None:
        from prefillcli.features.exits.policy import exit_profile_at

        if isinstance(self.settings, ExitOptions) and self.settings.exit_profile is not None:
            self.profile = exit_profile_at(self.settings.exit_profile)

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        from prefillcli.data.proof import hash_value
        from prefillcli.models.open import WORDS

        own = [name for name in values if details_of(type(self.settings), name).panel == EARLY_EXIT]
        hashed = {name: values.pop(name) for name in own}
        first = hashed.pop("first", ())  # a model goes by its contents, as a draft does
        if first:
            hashed["first"] = [name == WORDS for name in first]
        for name in ("recall", "precision", "compute"):
            if hashed.get(name) is None:
                hashed.pop(name, None)
        found = {"exit": hash_value(sorted(hashed.items()))}
        if self.profile is not None:
            found["exit_profile"] = hash_value(self.profile.model_dump(mode="json"))
        return found

    def identified(self, job: Job) -> None:
        if self.profile is not None:
            from prefillcli.features.exits.policy import job_of_exits, require_same_job

            require_same_job(self.profile, self.settings.exit_profile, job_of_exits(job))

    def surveyed(self, opening: Opening, survey: Survey) -> Outlook | None:
        from prefillcli.features.exits.outlook import outlook_of

        return outlook_of(opening, survey, self.profile) if isinstance(self.settings, ExitOptions) else None

    def models_opened(self, opening: Opening) -> None:
        opened, narrow = opening.opened, getattr(self.settings, "narrow", None)
        if narrow is not None:
            from prefillcli.models.dtype import require_faster
            from prefillcli.prefill.narrow import check_narrow

            check_narrow(narrow, opened.device, str(opened.files.origin) if opened.files.encoder else None)
            require_faster(narrow, opened.files.dtype, opened.device)
        if opened.files.head is None or not getattr(self.settings, "first", ()):
            return
        if any(each.files.head is None for each in opened.small):
            raise UsageError(
                "--first: the model's classification head is read, and the first model has only tokens\n"
                "give a first model with a head, or read the model's next token with --head vocabulary"
            )

    def first_window(self, job: Job, window: Window) -> None:
        for prompt in window.prompts:
            first = [set(own) for own in prompt.labels.first]
            if len(set().union(*first)) < sum(map(len, first)):
                option = self.settings.exit_option
                raise UsageError(
                    f"{option}: two labels begin with the same token after a prompt: the logits behind it, by which "
                    f"rows leave, do not tell them apart\nleave {option} out, or choose labels whose first tokens "
                    "differ (1=1 is a digit without the space before it)"
                )

    def learn(
        self, opening: Opening, engine: PlanEngine, plan: Mapping[str, Any], tick: Callable[[float], None]
    ) -> Mapping[str, Any]:
        from prefillcli.features.exits.first import readers_of
        from prefillcli.features.exits.learning import ExitLearning
        from prefillcli.features.exits.rare import RareLearning

        if getattr(self.settings, "estimate", None) is not None:  # its rows are read in full
            return {}
        job = cast("Job", opening)  # nothing else has the option
        learning = ExitLearning if self.settings.rare_option is None else RareLearning
        with job.clock.phase("exits"):
            self.exits = learning(job, engine, self.profile, readers_of(job, type(self))).exits()
        return {}

    def load(self, models: Models[Any]) -> FirstModels | None:
        from prefillcli.features.exits.first import load_first

        return load_first(models) if getattr(self.settings, "chain", ()) else None

    @classmethod
    def work(cls, beside: Any, asked: Any, tick: Tick) -> Any:
        return asked.answer(beside, tick)

    def ahead(self, questions: Sequence[Question], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        return ({}, 0) if self.exits is None else self.exits.ahead(questions, tick)

    def glance(self, scorer: Scorer, prompts: Sequence[Prompt], tick: Tick) -> Sequence[Readings]:
        from prefillcli.features.exits.first import readers_of, readings_of

        if self.readers is None:
            self.readers = [each for _, each in readers_of(scorer, type(self)).values()]
        return [readings_of(each.read(prompts, tick)) for each in self.readers]

    def known(self) -> Mapping[int, ScoredRow]:
        return {} if self.exits is None else self.exits.known

    def treatment(self, in_full: frozenset[int]) -> Treatment | None:
        return None if self.exits is None else self.exits.treatment(in_full)

    def answered(self, pack: Pack, answers: Sequence[Answer]) -> None:
        if self.exits is not None:
            self.exits.add(pack, answers)

    def window_written(self, job: Job, window: int) -> None:
        if self.exits is not None:
            self.exits.watch(job, window)

    def finished(self, job: Job) -> None:
        from prefillcli.features.exits.learning import FILE
        from prefillcli.features.exits.rare import SCORES

        job.sink.work.delete(FILE)
        job.sink.work.delete(SCORES)

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.features.exits.learning import stored_exit_use

        if counts is None:
            return
        use = stored_exit_use(job.sink.plan) if self.exits is None else self.exits.report(job.recorder.tokens)
        if use is not None:
            use.take(counts)
        job.report.blocks["exits"] = use

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.features.exits.learning import stored_exit_use

        use = report.blocks["exits"] = stored_exit_use(manifest.plan)
        if use is not None and manifest.counts is not None:
            use.take(manifest.counts)

    def leaving_rule(self, opened: Opened, labels: Labels) -> LeavingRule | None:
        from prefillcli.features.exits.policy import inspected_policy

        found = inspected_policy(self.settings.exit_profile, opened, labels)
        return None if found is None else found.inside

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        if report.blocks["exits"] is None:
            return None
        from prefillcli.features.exits.learning import section

        return section(report.blocks["exits"])


FEATURE = Exits
