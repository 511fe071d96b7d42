"""Digests by which a job recognises its own unfinished output; of a GGUF model all its files count."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from prefillcli.data.filesystems import filesystem_of, reading
from prefillcli.data.proof.contents import FileContents, Stamp, stamp_of
from prefillcli.errors import UsageError

_MODEL_FILES = (
    "config.json",
    "*.safetensors.index.json",
    "*.safetensors",
    "adapter_config.json",
    "*quant*.json",
    "*.py",
)
_TOKENIZER_FILES = (
    "tokenizer.*",
    "tokenizer_config.json",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def is_model_file(inner: str) -> bool:
    """Whether a path below a model's folder is that of a file which would be read with the model."""
    patterns = (*_MODEL_FILES, *_TOKENIZER_FILES, "generation_config.json", "*.gguf")
    return any(inner.count("/") == each.count("/") and fnmatchcase(inner, each) for each in patterns)


def hash_value(value: Any) -> str:
    """Digest of anything that JSON holds; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_model(folder: str | Path) -> str:
    """Digest of what a model computes: of a folder its configuration, code and weights, or of GGUF files, whole.

    Raises UsageError if there is no model.
    """
    return ModelContents(folder).model()


class ModelContents:
    """The files of a model folder or a GGUF model, with their contents as they were when this was made.

    Raises UsageError as `gguf_parts` does.
    """

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(folder)
        self._gguf = bool(gguf_parts(self._root))
        self._files = [_ModelFile.find(path) for path in self._find()]
        self._contents = FileContents(self._files, "model", lambda: [str(path) for path in self._find()])

    @property
    def paths(self) -> list[str]:
        """Where its files are."""
        return [file.path for file in self._files]

    def begin(self) -> None:
        """Start to hash, in the background."""
        self._contents.begin()

    def model(self) -> str:
        """Digest of what the model, or an adapter, computes. Raises as `FileContents.digests`, and UsageError for
        another folder.

        GGUF files are known by their contents alone, wherever they are and whatever they are called.
        """
        if self._gguf:
            return hash_value(["gguf", *self._contents.digests()])
        if not any((self._root / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise UsageError(f"{self._root} is not a model folder: it has no config.json")
        return self._digest(_MODEL_FILES)

    def tokenizer(self) -> str:
        """Digest of the tokenizer and its chat templates. Raises as `FileContents.digests`."""
        if self._gguf:
            return hash_value(["gguf tokenizer", *self._contents.digests()])
        return self._digest(_TOKENIZER_FILES)

    def require_unchanged(self) -> None:
        """Raise ContentChangedError if the folder has changed."""
        self._contents.require_unchanged()

    def _find(self) -> list[Path]:
        return gguf_parts(self._root) or _matching(self._root, (*_MODEL_FILES, *_TOKENIZER_FILES))

    def _digest(self, patterns: Iterable[str]) -> str:
        chosen = {str(path) for path in _matching(self._root, patterns)}
        digests = zip(self._files, self._contents.digests(), strict=True)
        return hash_value(
            [(str(Path(file.path).relative_to(self._root)), digest) for file, digest in digests if file.path in chosen]
        )


@dataclass(frozen=True, slots=True)
class _ModelFile:
    path: str
    filesystem: Any
    inner: str
    stamp: Stamp

    @classmethod
    def find(cls, path: Path) -> _ModelFile:
        filesystem, inner = filesystem_of(str(path))
        with reading(str(path)):
            return cls(str(path), filesystem, inner, stamp_of(filesystem, inner))


def _matching(root: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})


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
