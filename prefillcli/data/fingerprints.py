"""Digests by which a job recognises its own unfinished output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError

_BLOCKS, _BLOCK_BYTES = 64, 4096
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def hash_value(value: Any) -> str:
    """Digest of anything that JSON holds; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_model(folder: str | Path) -> str:
    """Digest of a model folder: the JSON files of its configuration whole, its weights by a sample.

    Of every safetensors file count size, header and 64 blocks of 4 KiB spread evenly over it. Raises
    UsageError if the folder has no config.json.
    """
    root = Path(folder)
    if not (root / "config.json").is_file():
        raise UsageError(f"{root} is no model folder: it has no config.json")
    whole = _digests(root, ("config.json", "*.safetensors.index.json"))
    return hash_value([*whole, *((path.name, _hash_weights(path)) for path in sorted(root.glob("*.safetensors")))])


def hash_tokenizer(folder: str | Path) -> str:
    """Digest of every tokenizer file of a model folder, chat templates included."""
    return hash_value(list(_digests(Path(folder), _TOKENIZER_FILES)))


def _digests(root: Path, patterns: Iterable[str]) -> Iterable[tuple[str, str]]:
    paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        yield str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_weights(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        hasher = hashlib.sha256(f"{size} {length} ".encode())
        hasher.update(file.read(min(length, size)))
        start = file.tell()
        for block in range(_BLOCKS):
            file.seek(start + max(size - start - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
            hasher.update(file.read(_BLOCK_BYTES))
    return hasher.hexdigest()
