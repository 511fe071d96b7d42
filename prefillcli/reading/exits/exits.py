"""Early exit: rows leave the model once their answer is decided, as often as a bound on flips allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prefillcli.core.roles import Judge, Reading
from prefillcli.errors import UsageError
from prefillcli.models.open import WORDS
from prefillcli.options.option import EARLY_EXIT, details_of
from prefillcli.reading.exits.first import readers_of
from prefillcli.reading.exits.policy import exit_profile_at, job_of_exits, require_same_job
from prefillcli.rows.proof import hash_value

if TYPE_CHECKING:
    from prefillcli.core.request import Request, Tick
    from prefillcli.core.run import Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import Answer, Treatment
    from prefillcli.models.open import Opened
    from prefillcli.plan.pack import Pack
    from prefillcli.reading.exits.first import FirstReading, Reader
    from prefillcli.reading.exits.learning import JobExits
    from prefillcli.reading.exits.policy import ExitProfile
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.tallies import Counts
    from prefillcli.rows.output.target import Manifest
    from prefillcli.rows.records import Prompt, ScoredRow


class Exits(Reading, Judge):
    """The exits of a job, once they are learnt. `read_as` states how prompts are read otherwise. Raises UsageError for
    a wrong exit profile."""

    def __init__(self, settings: Any, read_as: Sequence[Any] = ()) -> None:
        self.settings = settings
        self.profile: ExitProfile | None = None
        """The profile that an earlier job has learnt."""
        self.exits: JobExits | None = None
        self._read_as = read_as
        self._readers: list[Reader] | None = None  # for callers that ask for a glance
        if settings.exit_profile is not None:
            self.profile = exit_profile_at(settings.exit_profile)

    def require_models(self, opened: Opened) -> None:
        """Raise UsageError where these models cannot decide rows early."""
        narrow = self.settings.narrow
        if narrow is not None:
            from prefillcli.models.dtype import require_faster
            from prefillcli.walk.narrow import check_narrow

            check_narrow(narrow, opened.device, str(opened.files.origin) if opened.files.encoder else None)
            require_faster(narrow, opened.files.dtype, opened.device)
        if opened.files.head is not None and self.settings.first and any(not each.files.head for each in opened.small):
            raise UsageError(
                "--first: the model's classification head is read, and the first model has only tokens\n"
                "give a first model with a head, or read the model's next token with --head vocabulary"
            )

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        own = [name for name in values if details_of(type(self.settings), name).panel == EARLY_EXIT]
        hashed = {name: values.pop(name) for name in own}
        first = hashed.pop("first", ())  # a model is identified by its contents, as a draft is
        if first:
            hashed["first"] = [name == WORDS for name in first]
        for name in ("recall", "precision", "compute"):
            if hashed.get(name) is None:
                hashed.pop(name, None)
        found = {"exit": hash_value(sorted(hashed.items()))}
        if self.profile is not None:
            found["exit_profile"] = hash_value(self.profile.model_dump(mode="json"))
        return found

    def require_same_job(self, run: Run) -> None:
        """Raise UsageError for an exit profile of another job, once the fingerprint is known."""
        if self.profile is not None:
            require_same_job(self.profile, self.settings.exit_profile, job_of_exits(run, self._read_as))

    def learn(self, run: Run) -> None:
        """Learn when rows are decided, from some of them that are read in full, or from those of an estimate."""
        from prefillcli.reading.exits.learning import ExitLearning
        from prefillcli.reading.exits.rare import RareLearning

        if self.settings.estimate is not None:
            return
        learning = ExitLearning if self.settings.rare_option is None else RareLearning
        with run.clock.phase("exits"):
            self.exits = learning(run, self.profile, readers_of(run.scorer), self._read_as).exits()

    def ahead(self, questions: Sequence[Request], tick: Tick) -> tuple[dict[int, ScoredRow], int]:
        """Return the answers, by the places of these questions, that the model need not be asked for, and the tokens
        that first models have computed to find them."""
        return ({}, 0) if self.exits is None else self.exits.ahead(questions, tick)

    def glance(
        self, scorer: ModelScorer, prompts: Sequence[Prompt], tick: Tick
    ) -> Sequence[Sequence[FirstReading | None]]:
        """Return the readings of these prompts by each first model; None where it cannot read one."""
        if self._readers is None:
            self._readers = [each for _, each in readers_of(scorer).values()]
        return [each.read(prompts, tick) for each in self._readers]

    @property
    def known(self) -> Mapping[int, ScoredRow]:
        """Rows by number that were scored before the first window, to learn from them."""
        return {} if self.exits is None else self.exits.known

    def treatment(self, questions: Mapping[int, Request], in_full: frozenset[int]) -> Treatment | None:
        """Return its work between the layers on a pack's prompts with these `questions`, except those `in_full`; None
        if there is none."""
        return None if self.exits is None else self.exits.treatment(questions, in_full)

    def answered(self, pack: Pack, answers: Sequence[Answer]) -> None:
        """Take a pack whose prompts are all answered."""
        if self.exits is not None:
            self.exits.add(pack, answers)

    def window_written(self, run: Run, window: int) -> None:
        """Watch the flips of the audited rows of a window, with this index, whose rows are all written."""
        if self.exits is not None:
            self.exits.watch(run, window)

    def finished(self, run: Run) -> None:
        """Remove what was kept for a resumed job, once all rows are written."""
        from prefillcli.reading.exits.learning import FILE
        from prefillcli.reading.exits.rare import SCORES

        run.sink.work.delete(FILE)
        run.sink.work.delete(SCORES)

    def reported(self, run: Run, counts: Counts | None) -> None:
        from prefillcli.reading.exits.learning import stored_exit_use

        if counts is None:
            return
        use = stored_exit_use(run.sink.plan) if self.exits is None else self.exits.report(run.tokens)
        if use is not None:
            use.take(counts)
        run.report.exits = use

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        from prefillcli.reading.exits.learning import stored_exit_use

        use = report.exits = stored_exit_use(manifest.plan)
        if use is not None and manifest.counts is not None:
            use.take(manifest.counts)
