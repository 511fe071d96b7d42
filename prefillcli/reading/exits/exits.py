"""Early exit: rows leave the model once their answer is decided, as often as a bound on flips allows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from prefillcli.core.feature import Feature, Objection, SideFile, json_with
from prefillcli.errors import UsageError
from prefillcli.options.option import BENCH, EARLY_EXIT, Settings, details_of, option
from prefillcli.options.requirements import Requirement

if TYPE_CHECKING:
    from prefillcli.core.feature import (
        Answer,
        Contender,
        Counts,
        Equipment,
        Job,
        Labels,
        LeavingRule,
        LocalModels,
        Manifest,
        Material,
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
    from prefillcli.reading.exits.first import FirstModels, Reader
    from prefillcli.reading.exits.learning import JobExits
    from prefillcli.reading.exits.policy import ExitProfile













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
    methods = {name: (said, "learning what decides rows") for name, said in METHODS.items()}
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
        from prefillcli.reading.exits.policy import exits_path

        if self.settings.exit_profile is not None or self.settings.rare_option is not None:
            return []
        return [("exits", exits_path(report), "what is learnt of exits,")]

    def source_opened(self, opening: Opening) -> None:
        from prefillcli.reading.exits.policy import exit_profile_at

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
            from prefillcli.reading.exits.policy import job_of_exits, require_same_job

            require_same_job(self.profile, self.settings.exit_profile, job_of_exits(job))

    def surveyed(self, opening: Opening, survey: Survey) -> Outlook | None:
        from prefillcli.reading.exits.outlook import outlook_of

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
        from prefillcli.reading.exits.first import readers_of
        from prefillcli.reading.exits.learning import ExitLearning
        from prefillcli.reading.exits.rare import RareLearning

        if getattr(self.settings, "estimate", None) is not None:  # its rows are read in full
            return {}
        job = cast("Job", opening)  # nothing else has the option
        learning = ExitLearning if self.settings.rare_option is None else RareLearning
        with job.clock.phase("exits"):
            self.exits = learning(job, engine, self.profile, readers_of(job, type(self))).exits()
        return {}

    def load(self, models: Models[Any]) -> FirstModels | None:
        from prefillcli.reading.exits.first import load_first

        return load_first(models) if getattr(self.settings, "chain", ()) else None

    @classmethod
    def work(cls, beside: Any, asked: Any, tick: Tick) -> Any:
        return asked.answer(beside, tick)

    def ahead(self, questions: Sequence[Question], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        return ({}, 0) if self.exits is None else self.exits.ahead(questions, tick)

    def glance(self, scorer: Scorer, prompts: Sequence[Prompt], tick: Tick) -> Sequence[Readings]:
        from prefillcli.reading.exits.first import readers_of, readings_of

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
        from prefillcli.reading.exits.learning import FILE
        from prefillcli.reading.exits.rare import SCORES

        job.sink.work.delete(FILE)
        job.sink.work.delete(SCORES)

    def reported(self, job: Job, counts: Counts | None) -> None:
        from prefillcli.reading.exits.learning import stored_exit_use

        if counts is None:
            return
        use = stored_exit_use(job.sink.plan) if self.exits is None else self.exits.report(job.recorder.tokens)
        if use is not None:
            use.take(counts)
        job.report.blocks["exits"] = use

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.reading.exits.learning import stored_exit_use

        use = report.blocks["exits"] = stored_exit_use(manifest.plan)
        if use is not None and manifest.counts is not None:
            use.take(manifest.counts)

    def leaving_rule(self, opened: Opened, labels: Labels) -> LeavingRule | None:
        from prefillcli.reading.exits.policy import inspected_policy

        found = inspected_policy(self.settings.exit_profile, opened, labels)
        return None if found is None else found.inside

    @classmethod
    def contenders(cls, names: Collection[str], equipment: Equipment, material: Material) -> list[Contender]:
        from prefillcli.reading.exits.contender import learn_exits

        asked = [name for name in METHODS if name in names]
        return list(learn_exits(asked, equipment, material, cls)) if asked else []

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        if report.blocks["exits"] is None:
            return None
        from prefillcli.reading.exits.learning import section

        return section(report.blocks["exits"])


FEATURE = Exits
