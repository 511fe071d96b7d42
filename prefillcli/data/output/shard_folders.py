"""The work folders of shards, which lie beside the output that they are merged to."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa

from prefillcli.data.output import heartbeat, parts
from prefillcli.data.output.column_groups import ColumnGroups
from prefillcli.data.output.manifest import NAME, Manifest
from prefillcli.data.output.schema import OutputSchema
from prefillcli.data.output.store import Store, open_store
from prefillcli.data.output.target import Target
from prefillcli.data.paths import WORK_ENDING, split_path
from prefillcli.data.reading.partitions import Partitions
from prefillcli.data.shard import Shard
from prefillcli.stats.probabilities import Measure


@dataclass
class ShardRecord:
    """What the manifest of a shard says beside the job: all that it takes to write the output."""

    shard: str
    """Like `2/4`."""
    schema: dict[str, Any]
    """The output's columns (`of_schema`)."""
    partitions: dict[str, Any] | None
    """The folders of a partitioned output (`of_partitions`)."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this attempt from others, until it is begun anew."""
    windows: int | None = None
    """Windows of the input; set when complete."""

    @classmethod
    def of(cls, shard: Shard, schema: OutputSchema, partitions: Partitions | None) -> ShardRecord:
        return cls(str(shard), of_schema(schema), None if partitions is None else of_partitions(partitions))

    @classmethod
    def of_json(cls, content: Any) -> ShardRecord | None:
        """The record that `to_json` gave; None for anything else."""
        try:
            record = cls(**content)
            Shard.parse(record.shard)
        except (TypeError, ValueError):
            return None
        return record

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ShardFolder:
    """The work folder of a shard."""

    shard: Shard
    work: Store

    def begun(self) -> bool:
        """Whether anything of a job is in it; a lock that was left behind is not."""
        names = self.work.names()
        return NAME in names or any(map(parts.is_part, names))

    def manifest(self) -> Manifest | None:
        """Its manifest; None if there is none. Raises as `Manifest.load`."""
        return Manifest.load(self.work)

    def delete(self) -> None:
        """Remove it, the manifest after the parts: a run that is killed here leaves what says that it was merged."""
        self.work.delete_all(filter(parts.is_part, self.work.names()))
        self.work.delete(heartbeat.NAME)
        self.work.delete(NAME)
        self.work.remove()


def shards_beside(target: Target, *, empty: bool = False) -> list[ShardFolder]:
    """The folders of shards that lie beside an output, by count and number: those of a job, or the `empty` ones."""
    place, name = split_path(target.path)
    found = []
    for folder in open_store(place).folders():
        named = Shard.of_name(folder.removesuffix(WORK_ENDING)) if folder.endswith(WORK_ENDING) else None
        if named is not None and named[0] == name:
            found.append(folder_of(target, named[1]))
    return sorted(
        (each for each in found if each.begun() != empty), key=lambda each: (each.shard.count, each.shard.number)
    )


def folder_of(target: Target, shard: Shard) -> ShardFolder:
    """The folder of a shard of an output; it need not exist."""
    return ShardFolder(shard, Target(target.path, target.format, shard).work)


def of_schema(schema: OutputSchema) -> dict[str, Any]:
    """An output's columns as JSON; whether JSON is written as text follows from the format."""
    plain = {name: getattr(schema, name) for name in ("labels", "id_name", "json_carried", "truth")}
    plain |= {"audit": schema.groups.audit, **dict.fromkeys(schema.groups.names, True)}
    plain |= {} if schema.measure is Measure.SHARES else {"measure": schema.measure.value}
    return plain | {"carried": _packed(schema.carried)}


def to_schema(content: dict[str, Any], *, json_text: bool) -> OutputSchema:
    """The columns of `of_schema`. Raises KeyError, TypeError, ValueError or ArrowException for anything else."""
    rest = content | {"labels": tuple(content["labels"]), "carried": _unpacked(content["carried"])}
    rest["measure"] = Measure(content.get("measure", Measure.SHARES))
    groups = {each.name: rest.pop(each.name) for each in fields(ColumnGroups) if each.name in rest}
    return OutputSchema(**rest, groups=ColumnGroups(**groups), json_text=json_text)


def of_partitions(partitions: Partitions) -> dict[str, Any]:
    """The folders of a partitioned output as JSON."""
    return {
        "schema": _packed(partitions.schema),
        "values": list(partitions.values),
        "folders": list(partitions.folders),
    }


def to_partitions(content: dict[str, Any]) -> Partitions:
    """The folders of `of_partitions`. Raises as `to_schema`."""
    return Partitions(_unpacked(content["schema"]), tuple(content["values"]), tuple(content["folders"]))


def named(shards: Sequence[Shard]) -> str:
    """`shard 2 of 4`, `shards 2 and 3 of 4`, for a message."""
    numbers = [str(each.number) for each in shards]
    count = shards[0].count
    if len(numbers) == 1:
        return f"shard {numbers[0]} of {count}"
    return f"shards {', '.join(numbers[:-1])} and {numbers[-1]} of {count}"


def _packed(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _unpacked(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
