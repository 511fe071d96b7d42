"""Digests by which a job recognises its own unfinished output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from prefillcli.data.filesystems import filesystem_of, reading
from prefillcli.data.proof.contents import FileContents
from prefillcli.data.proof.gguf_parts import gguf_parts
from prefillcli.data.proof.stamps import Stamp, stamp_of
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
