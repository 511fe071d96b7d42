"""The sink of a shard: its rows stay in parts, from which `prefill merge` makes the output."""

from __future__ import annotations

from prefillcli.data.output.locks import Lock
from prefillcli.data.output.manifest import Job, Manifest
from prefillcli.data.output.resuming import find_resumable_shard, proven_parts, require_undamaged
from prefillcli.data.output.retrying import retried
from prefillcli.data.output.shard_folders import ShardRecord
from prefillcli.data.output.sink import Sink
from prefillcli.data.output.target import Target
from prefillcli.data.rows import Int64Array
from prefillcli.errors import PrefillError, UsageError


class ShardSink(Sink):
    """Collects the results of a shard in `<output>.shard-I-of-N.prefill/`.

    It is complete when these are all there, or when the shards were merged: then the output is.
    """

    _without: set[int]
    """Windows of the input that have no rows of this shard, as far as they were read."""

    @property
    def merged(self) -> bool:
        """Whether the job's output is there already."""
        return _is_merged(self._manifest)

    @property
    def location(self) -> str:
        """The work folder with the parts, or the output if it is there."""
        return self._target.path if self.merged else self.work.location

    @property
    def empty_input(self) -> bool:
        if self.merged:
            return self.counts.total == 0
        return self._record.windows == 0

    def window_before(self, window: int) -> int:
        """The last window before this one that has rows of the shard."""
        before = window - 1
        while before in self._without:
            before -= 1
        return before

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Whether all of these rows, which the shard has of a window, are in its parts. Raises as in a `Sink`."""
        if len(rows) == 0:
            self._without.add(window)
            return True
        return super().finished(window, rows)

    def finish(self, windows: int) -> None:
        """Mark the shard as complete. Raises PrefillError if rows are missing.

        `windows` is the number of windows of the input.
        """
        if self.complete:
            return
        self._parts.require_complete(windows, self._without)
        self._lock.check()
        record = self._record
        record.windows = windows
        manifest = self._manifest
        manifest.state, manifest.counts, manifest.shard = "complete", self._parts.counts, record.to_json()
        manifest.save(self.work)

    @property
    def _record(self) -> ShardRecord:
        record = ShardRecord.of_json(self._manifest.shard)
        if record is None:
            raise PrefillError(f"{self.work.location}/manifest.json: no shard is named there")
        return record

    def _begin(self, *, fresh: bool) -> None:
        self._without = set()
        manifest, shard = self._manifest, self._target.shard
        if self.merged:
            self._final = manifest.counts or self._target.count(self._schema.id_name)
            return
        self.work.clean(lambda name: True)
        if fresh:
            self._delete_parts()
        else:
            self._add_parts(proven_parts(self.work, manifest.job, shard))
        record = ShardRecord.of_json(manifest.shard)
        record = None if record is None or record.shard != str(shard) else record
        lost = manifest.counts is None or manifest.counts.total != self._parts.counts.total
        if fresh or record is None or (manifest.state == "complete" and lost):
            if shard is None:
                raise PrefillError(f"{self.work.location}: no shard is named")
            manifest.state, manifest.counts = "running", None
            manifest.shard = (record or ShardRecord.of(shard, self._schema, self._partitions)).to_json()
            manifest.shard["windows"] = None
            manifest.save(self.work)

    @staticmethod
    def _find(target: Target, job: Job, resume: bool, overwrite: bool, *, quiet: bool) -> Manifest | None:
        return find_resumable_shard(target, job, resume, overwrite, quiet=quiet)

    @staticmethod
    def _require_undamaged(target: Target, manifest: Manifest) -> None:
        if _is_merged(manifest):
            require_undamaged(target.whole, manifest)

    @staticmethod
    def _again(target: Target, found: Manifest, id_name: str | None) -> Manifest | None:
        if _is_merged(found) and retried(target.whole, found, id_name) is not None:
            raise UsageError(
                f"--retry-errors: the shards of {target.path} were merged\nscore its error rows again without --shard"
            )
        return None  # a shard keeps its parts

    @staticmethod
    def _lock_of(target: Target, found: Manifest | None) -> Lock:
        return _Unlocked() if found is not None and _is_merged(found) else target.work.lock()


class _Unlocked:
    """Nothing is written to an output that is complete."""

    def check(self) -> None: ...

    def release(self) -> None: ...


def _is_merged(manifest: Manifest) -> bool:
    return manifest.state == "complete" and manifest.shard is None
