"""The job of `prefill score`: source -> prompts -> plan -> engine -> sink -> report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prefillcli.clock import Clock, peak_memory
from prefillcli.config import ScoreSettings, parse_size
from prefillcli.data.fingerprints import hash_model, hash_tokenizer, hash_value
from prefillcli.data.labels import Labels, parse_labels
from prefillcli.data.prompts import DEFAULT_COLUMN, PromptBuilder, PromptSettings
from prefillcli.data.rows import Window
from prefillcli.data.sink import Sink
from prefillcli.data.source import Source
from prefillcli.data.windows import Ahead, windows
from prefillcli.errors import (
    OutputBusyError,
    OutputConflictError,
    OutputExistsError,
    PrefillError,
    ResourceError,
    UsageError,
    brief,
)
from prefillcli.outcome import conclude, fail
from prefillcli.paths import default_output, default_report, refuse_to_replace_input
from prefillcli.plan.pack import Limits
from prefillcli.progress import Progress
from prefillcli.report.run import RunReport, print_table, save_report, versions
from prefillcli.samples import sample_model
from prefillcli.scorer import WindowScorer
from prefillcli.signals import Stop

if TYPE_CHECKING:  # torch takes seconds to import; wrong input should not wait for it
    import torch

    from prefillcli.engines.base import Engine
    from prefillcli.prefill.model import ModelFiles


def score_job(settings: ScoreSettings) -> dict[str, Any]:
    """Run the job; write `run.json` whatever happens; return the summary for the last line on stdout.

    Errors are told on stderr, and become the exit code in the summary.
    """
    clock = Clock()
    report = RunReport(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings.model_dump(mode="json"),
    )
    job = _ScoreJob(settings, clock, report)
    try:
        with Stop() as stop:
            job.run(stop)
    except BaseException as error:
        fail(error, report, debug=settings.debug)
    job.finish_report()
    if report.report is not None:
        try:
            save_report(report, report.report)
        except (OSError, PrefillError) as error:
            print(f"prefill: cannot write the report: {error}", file=sys.stderr)
            report.report = None
            report.exit_code = report.exit_code or ResourceError.exit_code
    if not settings.quiet and report.status == "complete":
        print_table(report)
    return report.summary()


class _ScoreJob:
    """One run of `prefill score`."""

    def __init__(self, settings: ScoreSettings, clock: Clock, report: RunReport) -> None:
        self.settings = settings
        self.clock = clock
        self.report = report
        self.source: Source | None = None
        self.builder: PromptBuilder | None = None
        self.sink: Sink | None = None
        self._scored_before = 0  # rows that an earlier run has scored

    def run(self, stop: Stop) -> None:
        settings, clock, report = self.settings, self.clock, self.report
        output = settings.output or default_output(settings.inputs[0])
        report.output = output
        report.report = settings.report or default_report(output)
        with clock.phase("read"):
            source = self.source = Source.open(
                settings.inputs, limit=settings.limit, sample=settings.sample, seed=settings.seed
            )
            source.select(columns=self._named_columns(), carried=self._carried())
        for path in source.left_out:
            print(
                f"prefill: warning: {path}: not read, neither Parquet nor JSON Lines by its name",
                file=sys.stderr,
            )
        with clock.phase("load"), stop.at_once():
            files, device, tokenizer = self._open_model()
        builder = self.builder = PromptBuilder(
            tokenizer,
            PromptSettings(
                prompt_column=settings.prompt_column,
                template=settings.template,
                chat=settings.chat,
                system=settings.system,
                max_length=min(settings.max_length or files.max_length, files.max_length),
                on_long=settings.on_long,
                vocab_size=files.config.vocab_size,
            ),
            source.available,
        )
        source.select(columns=builder.columns, carried=self._carried())
        labels = Labels(tokenizer, parse_labels(settings.labels))
        with clock.phase("read"), stop.at_once():
            report.fingerprint = {
                "input": source.fingerprint(),
                "model": hash_model(files.path),
                "tokenizer": hash_tokenizer(files.path),
                "prompt": builder.fingerprint(),
                "labels": hash_value([[label.name, label.variants] for label in labels.labels]),
                "settings": hash_value(
                    [settings.temperature, str(files.dtype), settings.id_column, list(settings.keep_columns)]
                ),
            }
        refuse_to_replace_input(output, (file.path for file in source.files))
        with self._open_sink(output, source, labels) as sink:
            self.sink = sink
            report.resumed = sink.counts.total > 0
            self._scored_before = sink.counts.scored
            if not sink.complete:
                self._score(source, builder, labels, sink, files, device, stop)
        conclude(report, sink.counts, max_error_rate=settings.max_error_rate, skip_empty=settings.skip_empty)

    def _carried(self) -> list[str]:
        """Input columns that go to the output."""
        return ([self.settings.id_column] if self.settings.id_column else []) + list(self.settings.keep_columns)

    def _named_columns(self) -> list[str]:
        """Columns that the prompt certainly needs, known before the tokenizer and the template are."""
        given = self.settings.template is None and self.settings.prompt_column != DEFAULT_COLUMN
        return [self.settings.prompt_column] if given else []

    def _open_sink(self, output: str, source: Source, labels: Labels) -> Sink:
        """The output. Where it must not be touched, neither must the report that lies beside it."""
        settings = self.settings
        try:
            return Sink.open(
                output,
                fingerprint=self.report.fingerprint,
                resume=settings.resume,
                overwrite=settings.overwrite,
                label_names=labels.names,
                carried=source.carried_schema,
                id_name=settings.id_column,
                jsonl_input=source.kind == "jsonl",
            )
        except (OutputExistsError, OutputConflictError, OutputBusyError):
            self.report.report = None
            raise

    def _open_model(self) -> tuple[ModelFiles, torch.device, Any]:
        """The model's files, checked, its device and its tokenizer; no weights."""
        from transformers import AutoTokenizer

        from prefillcli.prefill.model import choose_device, find_model, read_model_files

        settings = self.settings
        if settings.model is None:
            path = sample_model()
            print(
                f"prefill: warning: no --model given; the sample model in {path} is for demonstration",
                file=sys.stderr,
            )
        else:
            path = find_model(settings.model, settings.revision)
        device = choose_device(settings.device)
        files = read_model_files(
            path, dtype=settings.dtype, device=device.type, trust_remote_code=settings.trust_remote_code
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise UsageError(f"{path}: cannot load the tokenizer: {brief(error)}") from None
        return files, device, tokenizer

    def _score(
        self,
        source: Source,
        builder: PromptBuilder,
        labels: Labels,
        sink: Sink,
        files: ModelFiles,
        device: torch.device,
        stop: Stop,
    ) -> None:
        settings, clock = self.settings, self.clock
        coming = Ahead(windows(source, builder, labels, id_column=settings.id_column, skip=sink.finished))
        progress = Progress(source.selected_rows, interval=settings.progress_interval, quiet=settings.quiet)
        with coming, progress:
            progress.advance(sink.counts.total)
            scorer: WindowScorer | None = None
            for window in self._waiting(coming, stop):
                if scorer is None:
                    labels.check(window)
                    with clock.phase("load"), stop.at_once():
                        engine = self._load_engine(files, device, sink)
                    scorer = WindowScorer(
                        engine,
                        sink,
                        labels,
                        schedule=settings.schedule,
                        temperature=settings.temperature,
                        report=self.report,
                        clock=clock,
                        progress=progress,
                        stop=stop,
                    )
                scorer.score(window)
            with clock.phase("write"):
                sink.finish()
        if scorer is not None:
            engine.close()

    def _waiting(self, coming: Iterator[Window], stop: Stop) -> Iterator[Window]:
        """The windows, with the time spent waiting for them."""
        while True:
            with self.clock.phase("waiting"), stop.at_once():
                window = next(coming, None)
            if window is None:
                return
            yield window

    def _load_engine(self, files: ModelFiles, device: torch.device, sink: Sink) -> Engine:
        from prefillcli.engines.torch import TorchEngine
        from prefillcli.prefill.memory import (
            FREE_SHARE,
            available_memory,
            choose_chunk,
            memory_law,
            pack_limits,
        )
        from prefillcli.prefill.model import load_model

        settings = self.settings
        model = load_model(files, device, trust_remote_code=settings.trust_remote_code)
        law = memory_law(files.config, files.dtype)
        budget = parse_size(settings.memory) if settings.memory else int(available_memory(device) * FREE_SHARE)
        chosen = (settings.memory, settings.pack_tokens, settings.chunk_tokens, settings.prefix_kv)
        chunk_tokens = settings.chunk_tokens or choose_chunk(law, budget, device)
        limits = pack_limits(
            law,
            budget=budget,
            device=device,
            chunk_tokens=chunk_tokens,
            pack_tokens=settings.pack_tokens,
            prefix_kv=settings.prefix_kv,
        )
        before = sink.plan  # a resumed run cuts the same packs, unless it is told otherwise or they no longer fit
        if before and before["asked"] == list(chosen) and before["limits"]["max_tokens"] <= limits.max_tokens:
            chunk_tokens, limits = before["chunk_tokens"], Limits(**before["limits"])
        sink.plan = {"asked": list(chosen), "chunk_tokens": chunk_tokens, "limits": asdict(limits)}
        return TorchEngine(
            model, limits=limits, chunk_tokens=chunk_tokens, offload_held=settings.prefix_kv == "offload"
        )

    def finish_report(self) -> None:
        """Put the numbers of the run into the report."""
        report, seconds = self.report, self.report.seconds
        if self.sink is not None:
            counts = self.sink.counts
            rows = report.rows
            rows.total, rows.scored, rows.errors, rows.skipped = (
                counts.total,
                counts.scored,
                counts.errors,
                counts.skipped,
            )
            rows.errors_by_code = dict(counts.errors_by_code)
            report.mean_score = counts.mean_score
        for name, value in self.clock.seconds.items():
            setattr(seconds, name, value)
        if self.source is not None:
            seconds.read += self.source.seconds
        if self.builder is not None:
            seconds.render, seconds.tokenize = self.builder.render_seconds, self.builder.tokenize_seconds
        seconds.total = self.clock.total
        report.rows_per_second = (report.rows.scored - self._scored_before) / seconds.total
        report.tokens_per_second = report.tokens.prompt / seconds.total
        report.peak_memory_bytes = type(report.peak_memory_bytes)(**peak_memory())
        report.versions = versions()
