"""The windows of a job's input, made in the background ahead of the model."""

from __future__ import annotations

from collections.abc import Callable

from prefillcli.data.dealing import ShardRows
from prefillcli.data.output.row_digests import RowDigests
from prefillcli.data.output.sink import Sink
from prefillcli.data.rows import Window
from prefillcli.data.windows import Prefetcher, windows
from prefillcli.jobs.inputs import Granularity, JobInputs
from prefillcli.options.score import ScoreSettings


def coming_windows(
    settings: ScoreSettings, inputs: JobInputs, sink: Sink, granularity: Granularity, ended: Callable[[int], None]
) -> Prefetcher[Window]:
    """Those that are not finished, with the digests of their rows. At the end `ended` is called with their number."""
    shard, source, choice = settings.shard_of, inputs.source, inputs.choice
    chosen_by = () if choice is None else [name for name in choice.columns if name in source.carried_schema.names]
    return Prefetcher(
        windows(
            source,
            inputs.builder,
            inputs.labels,
            id_column=settings.id_column,
            max_rows=granularity.window_rows,
            batch_rows=granularity.batch_rows,
            skip=sink.finished,
            only=None if shard is None else ShardRows(shard, inputs.builder),
            ended=ended,
            digest=RowDigests(
                inputs.labels,
                id_column=settings.id_column,
                json_carried=source.kind == "jsonl",
                columns=chosen_by,
                common=inputs.content_free,
            ),
        ),
        cancel=inputs.builder.close,
    )
