"""Which files a model in GGUF format consists of."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from prefillcli.errors import UsageError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "mmproj"  # begins the name of the file with the image part of a model, which reads no text


def gguf_parts(path: Path) -> list[Path]:
    """The files of the GGUF model that `path` names, in order; none where it names no such model.

    `path` is a file, one part of a model that is split (`-00001-of-00003.gguf`), or a folder without `config.json`
    that holds one model. Raises UsageError where parts are missing, or a folder holds several models.
    """
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _parts_of(path) if path.is_file() else []
    if not path.is_dir() or (path / "config.json").exists():
        return []
    models: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(path.iterdir()):
        if file.suffix.lower() == ".gguf" and file.is_file() and not file.name.lower().startswith(_PROJECTOR):
            part = _PART.fullmatch(file.name)
            models[f"{part['stem']} of {part['count']}" if part else file.name].append(file)
    if len(models) > 1:
        names = [files[0].name for files in models.values()]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise UsageError(
            f"{path}: holds {len(names)} models: {', '.join(names[:3])}{more}\n"
            f"give the file of one, --model {path / names[0]} for example"
        )
    return _parts_of(next(iter(models.values()))[0]) if models else []


def _parts_of(file: Path) -> list[Path]:
    """All parts of the model that a file belongs to. Raises UsageError where one is missing."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part["count"])
    names = [f"{part['stem']}-{number:05}-of-{part['count']}{file.suffix}" for number in range(1, count + 1)]
    if not 1 <= int(part["number"]) <= count:
        raise UsageError(f"{file}: there is no part {int(part['number'])} of {count}")
    missing = [name for name in names if not (file.parent / name).is_file()]
    if missing:
        raise UsageError(
            f"{file.parent}: {len(missing)} of {count} parts of the model are missing, {missing[0]} among them\n"
            "put all parts into one folder"
        )
    return [file.parent / name for name in names]
