"""Proof that files have not changed: contents of an input, fingerprints of a job, seals of written files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from prefillcli.errors import ContentChangedError, DamagedFileError, PrefillError, UsageError, run_again
from prefillcli.rows.filesystems import filesystem_of, is_local, patiently, reading, require_reachable
from prefillcli.runtime.user_cache import KeptEntries

# A file that changed more recently than this could change again unnoticed: file times have steps of up to 2 seconds,
# and the clock of a file server may be a little off.
SETTLED_NS = 5_000_000_000

# Versions that stores give instead of digests, by their names in fsspec's filesystems.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id", "xet_hash", "sha")


@dataclass(frozen=True, slots=True)
class Stamp:
    """A version of a file. Equal stamps mean equal content, unless the file was still young: see `settled`."""

    size: int  # Bytes
    # For a local file: device, inode, size and time of modification; else the store's description of the object.
    identity: tuple[int | str, ...]
    # When the inode changed: no program can set it, and it also changes with name and rights. 0 for a remote file.
    changed_ns: int = 0
    version: str | None = None  # a remote store's substitute for a digest: an ETag or a generation

    def settled(self, at_ns: int) -> bool:
        """Return whether any change after `at_ns` gives another stamp."""
        return at_ns - self.changed_ns > SETTLED_NS


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as it was when it was found."""

    path: str  # as a user would name it: local path or URL
    filesystem: Any
    inner: str  # the path inside `filesystem`
    stamp: Stamp

    @property
    def local(self) -> bool:
        return is_local(self.filesystem)


def stamp_of(filesystem: Any, inner: str, *, fresh: bool = False) -> Stamp:
    """Return the stamp of a file now; `fresh` asks a remote store again, whatever was listed before.

    Raises FileNotFoundError, OSError, or errors of an object store's client.
    """
    if is_local(filesystem):
        status = os.stat(inner)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return Stamp(status.st_size, identity, status.st_ctime_ns)
    if fresh:
        filesystem.invalidate_cache(inner)
    info = patiently(lambda: filesystem.info(inner))
    size = int(info.get("size") or 0)
    found = {name: value for name in _VERSIONS if (value := info.get(name))}
    # Two contents may share a weak ETag.
    version = next((f"{name} {value}" for name, value in found.items() if not str(value).startswith("W/")), None)
    if version is not None:
        return Stamp(size, (size, version), version=version)
    times = [str(info[name]) for name in ("mtime", "LastModified", "last_modified", "created") if info.get(name)]
    return Stamp(size, (size, *times))


MOST = 4096


class DigestCache:
    """Digests of local files by path and stamp, in `$XDG_CACHE_HOME/prefillcli/digests.json`.

    The file is always replaced as a whole: if two processes write at once, the new entries of one are lost, and those
    files are read once more. A cache that is damaged, missing or cannot be written counts as empty.
    """

    def __init__(self, most: int = MOST) -> None:
        self._kept = KeptEntries("digests.json")
        self._most = most
        self._entries: dict[str, list[Any]] | None = None
        self._new: dict[str, list[Any]] = {}

    def get(self, path: str, stamp: Stamp) -> str | None:
        """Return the digest of this version of the file, if it is known."""
        if self._entries is None:
            self._entries = self._kept.read()
        entry = self._entries.get(_key(path, stamp))
        if entry is None:
            return None
        self._new[_key(path, stamp)] = [entry[0], int(time.time())]
        return str(entry[0])

    def put(self, path: str, stamp: Stamp, digest: str) -> None:
        """Remember a digest; the caller vouches that the stamp was settled before the file was read."""
        self._new[_key(path, stamp)] = [digest, int(time.time())]

    def save(self) -> None:
        """Add new entries to the file, which keeps the `most` entries used last.

        Never raises for a folder that cannot be written.
        """
        if not self._new:
            return
        entries = self._kept.read() | self._new
        self._kept.write(dict(sorted(entries.items(), key=lambda item: -item[1][1])[: self._most]))
        self._new = {}


def _key(path: str, stamp: Stamp) -> str:
    return json.dumps([path, *stamp.identity, stamp.changed_ns])


_BLOCK = 4 << 20
_THREADS = 4


class FileContents:
    """A digest of every file, made in background threads, and later whether the files are still the same.

    `what` names them in messages. `find` lists the paths again, to notice files that come or go.
    """

    def __init__(self, files: Sequence[FoundFile], what: str, find: Callable[[], Sequence[str]]) -> None:
        self._files = tuple(files)
        self._what = what
        self._find = find
        self._stamps = [file.stamp for file in files]
        self._results: list[Future[tuple[str, bool]]] = []
        self._cache = DigestCache()
        self._digests: list[str] | None = None
        self._proven: list[bool] = []  # whether an equal stamp proves equal content

    def begin(self) -> None:
        """Start to hash, in the background."""
        if self._results:
            return
        self._results = [Future() for _ in self._files]
        todo = deque(enumerate(self._files))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not todo:
                        return
                    number, file = todo.popleft()
                try:
                    self._results[number].set_result(self._known(file, lock))
                except BaseException as error:  # raised again for whoever asks for the digest
                    self._results[number].set_exception(error)

        for _ in range(min(_THREADS, os.cpu_count() or 1, len(self._files))):
            # a daemon: a run that is stopped need not wait for it
            threading.Thread(target=work, name="prefill-hash", daemon=True).start()

    def digests(self) -> list[str]:
        """Return the digests in the order of the files; of a remote file the version that its store gives.

        Waits for them. Raises ContentChangedError if a file has changed since it was found, PrefillError if it cannot
        be read.
        """
        if self._digests is None:
            self.begin()
            found = [result.result() for result in self._results]
            self._proven = [proven for _, proven in found]
            self._digests = [digest for digest, _ in found]
            self._cache.save()
        return self._digests

    def require_unchanged(self, numbers: Iterable[int] | None = None) -> None:
        """Raise ContentChangedError if the files have changed since they were found.

        Checks the files with these `numbers`; without them all files, of which none may have come or gone. Costs a
        look at each file's times. Files that were hashed right after a change, and those that were renamed or whose
        rights changed, are read again. Remote files whose store gives neither version nor time are not proven.
        """
        if numbers is None:
            self._require_same_files()
        for number in range(len(self._files)) if numbers is None else numbers:
            self._require(number)

    def _known(self, file: FoundFile, lock: threading.Lock) -> tuple[str, bool]:
        # `content_digest`, remembered for local files whose stamp proves it.
        local = file.local
        if local:
            with lock:
                remembered = self._cache.get(file.inner, file.stamp)
            if remembered is not None and current(file, self._what) == file.stamp:
                return remembered, True
        digest, proven = content_digest(file, file.stamp, self._what)
        if local and proven:
            with lock:
                self._cache.put(file.inner, file.stamp, digest)
        return digest, proven

    def _require(self, number: int) -> None:
        file, before = self._files[number], self._stamps[number]
        now = current(file, self._what)
        if now.identity != before.identity:
            raise changed(file.path, self._what)
        if self._digests is None or (now == before and self._proven[number]):
            return
        digest, proven = content_digest(file, now, self._what)
        if digest != self._digests[number]:
            raise changed(file.path, self._what)
        self._stamps[number], self._proven[number] = now, proven

    def _require_same_files(self) -> None:
        before = [file.path for file in self._files]
        try:
            now = list(self._find())
        except PrefillError as error:
            raise ContentChangedError(f"{error}\n{_advice()}") from None
        if now != before:
            came, went = set(now) - set(before), set(before) - set(now)
            told = [f"{path} is new" for path in sorted(came)[:1]] + [f"{path} is gone" for path in sorted(went)[:1]]
            what = " and ".join(told) or "files changed places"
            raise ContentChangedError(f"while the job ran, {what}\n{_advice()}")


def _advice() -> str:
    return f"nothing was written from what changed: put it back and {run_again(or_overwrite=True)}"


def changed(path: str, what: str) -> ContentChangedError:
    """Return the error for a file that has changed."""
    return ContentChangedError(f"{path} changed while the job ran; its fingerprint names another {what}\n{_advice()}")


def require_same(file: FoundFile) -> None:
    """Raise ContentChangedError if a local path no longer leads to the file, and the version of it, that was found.

    Called right after opening it, this shows that the open file is the one that was found.
    """
    if file.local and current(file, "input").identity != file.stamp.identity:
        raise changed(file.path, "input")


def current(file: FoundFile, what: str) -> Stamp:
    """Return the stamp of a file now. Raises ContentChangedError if it is gone, PrefillError if it cannot be looked
    at."""
    try:
        with reading(file.path):
            return stamp_of(file.filesystem, file.inner, fresh=True)
    except PrefillError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ContentChangedError(f"{file.path} is gone while the job ran\n{_advice()}") from None
        raise


def content_digest(file: FoundFile, stamp: Stamp, what: str) -> tuple[str, bool]:
    """Return the BLAKE3 digest of a file of this stamp, and whether an equal stamp proves the same content from now
    on.

    Raises ContentChangedError if the file has another stamp, before or after it was read.
    """
    if stamp.version is not None:
        return stamp.version, True
    started = time.time_ns()
    hasher = blake3()
    block = memoryview(bytearray(min(_BLOCK, max(stamp.size, 1) + 1)))
    with reading(file.path), _open(file) as stream:
        while size := stream.readinto(block):
            hasher.update(block[:size])
    after = current(file, what)
    if after.identity != stamp.identity:
        raise changed(file.path, what)
    return hasher.hexdigest(), after == stamp and stamp.settled(started)


def _open(file: FoundFile) -> Any:
    if file.local:
        return open(file.inner, "rb", buffering=0)
    return file.filesystem.open(file.inner, "rb")


_MODEL_FILES = (
    "config.json",
    "*.safetensors.index.json",
    "*.safetensors",
    "adapter_config.json",
    "*quant*.json",
    "*.py",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")  # how a model's images are prepared
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
    *PROCESSOR_FILES,
)
_GGUF_RULES = (
    2  # by which `models/gguf_tokenizer.py` makes a tokenizer of a file: with others, texts have other tokens
)


def is_model_file(inner: str) -> bool:
    """Return whether a path below a model's folder is that of a file that loading the model would read."""
    patterns = (*_MODEL_FILES, *_TOKENIZER_FILES, "generation_config.json", "*.gguf")
    return any(inner.count("/") == each.count("/") and fnmatchcase(inner, each) for each in patterns)


def hash_value(value: Any) -> str:
    """Return the digest of anything that JSON holds; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_model(folder: str | Path) -> str:
    """Return the digest of everything that a model computes with: a folder's configuration, code and weights, or whole
    GGUF files.

    Raises UsageError if there is no model.
    """
    return ModelContents(folder).model()


class ModelContents:
    """The files of a model folder or a GGUF model, with their contents at the time this was made.

    Raises UsageError as `gguf_parts` does.
    """

    def __init__(self, folder: str | Path) -> None:
        self._root = Path(folder)
        for path in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            if is_model_file(path.name):  # a file that is missing may be optional, and the model another one without
                require_reachable(str(path))
        self._gguf = bool(gguf_parts(self._root))
        self._files = [_found(path) for path in self._find()]
        self._contents = FileContents(self._files, "model", lambda: [str(path) for path in self._find()])

    @property
    def paths(self) -> list[str]:
        """The paths of its files."""
        return [file.path for file in self._files]

    def begin(self) -> None:
        """Start to hash, in the background."""
        self._contents.begin()

    def model(self) -> str:
        """Return the digest of everything that the model, or an adapter, computes with. Raises as
        `FileContents.digests`, and UsageError for another folder.

        GGUF files are identified by their contents alone, not by place or name.
        """
        if self._gguf:
            return hash_value(["gguf", *self._contents.digests()])
        if not any((self._root / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise UsageError(f"{self._root} is not a model folder: it has no config.json")
        return self._digest(_MODEL_FILES)

    def tokenizer(self) -> str:
        """Return the digest of the tokenizer and its chat templates. Raises as `FileContents.digests`."""
        if self._gguf:
            return hash_value(["gguf tokenizer", _GGUF_RULES, *self._contents.digests()])
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


def _found(path: Path) -> FoundFile:
    filesystem, inner = filesystem_of(str(path))
    with reading(str(path)):
        return FoundFile(str(path), filesystem, inner, stamp_of(filesystem, inner))


def _matching(root: Path, patterns: Iterable[str]) -> list[Path]:
    # As `root.glob` for each pattern, but a folder is listed once for all of them: it may be on a network.
    names: dict[str, list[str]] = defaultdict(list)
    for pattern in patterns:
        folder, _, name = pattern.rpartition("/")
        names[folder].append(name)
    found = []
    for folder, wanted in names.items():
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found += [path for path in (root / folder).iterdir() if any(fnmatchcase(path.name, own) for own in wanted)]
    return sorted(path for path in found if path.is_file())


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "mmproj"  # beginning of the name of a file with a model's image part, which reads no text


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of the GGUF model that `path` names, in order; none if it names no such model.

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
    # All parts of the model that a file belongs to. Raises UsageError where one is missing.
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


JOB_KEY = b"prefillcli"  # key of the job in the metadata of a Parquet file that a job wrote
_KEY = b"prefillcli.seal"
_BLANK = b"0" * 64
_MAGIC = b"PAR1"
_SEALED_BLOCK = 1 << 20
UNSEALED = {_KEY: _BLANK}  # metadata of a Parquet file that is to be sealed


class Digesting(io.RawIOBase):
    """A file to write, with the digest of everything written to it. Closing it leaves the file open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        size = len(memoryview(data))
        self._size += size
        return size

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal digits."""
        return self._hash.hexdigest()


def seal(file: IO[bytes], digest: str) -> None:
    """Put the digest of a Parquet file that has the entry `UNSEALED` into the seal's place."""
    start, footer = _footer(file)
    file.seek(start + _place(footer))
    file.write(digest.encode())
    file.seek(0, io.SEEK_END)


def seal_of(file: IO[bytes]) -> str:
    """Return the digest that a Parquet file has in its seal. Raises DamagedFileError if it has no seal."""
    _, footer = _footer(file)
    place = _place(footer)
    return footer[place : place + len(_BLANK)].decode("ascii", errors="replace")


def digest_of(file: IO[bytes], *, sealed: bool) -> str:
    """Return the digest of a file's content; of a `sealed` Parquet file with the seal left blank.

    Raises DamagedFileError if there is no seal.
    """
    rest, tail = (None, b"")
    if sealed:
        rest, footer = _footer(file)
        place = _place(footer)
        tail = footer[:place] + _BLANK + footer[place + len(_BLANK) :]
    file.seek(0)
    hasher = hashlib.sha256()
    while block := file.read(_SEALED_BLOCK if rest is None else min(_SEALED_BLOCK, rest)):
        hasher.update(block)
        rest = None if rest is None else rest - len(block)
    hasher.update(tail)
    return hasher.hexdigest()


def require_seal(file: IO[bytes]) -> None:
    """Raise DamagedFileError if a Parquet file has changed since it was sealed."""
    if seal_of(file) != digest_of(file, sealed=True):
        raise DamagedFileError("its bytes are not those that were written")


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, for `json.dumps`: copies of all that they hold take longer than the JSON.

    Raises TypeError for anything else.
    """
    return {each.name: getattr(value, each.name) for each in fields(value)}


def with_checksum(content: dict[str, Any]) -> bytes:
    """Return JSON with its own checksum."""
    content = json.loads(json.dumps(content, default=fields_of))
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1).encode()


def sealed_text(text: str) -> str:
    """Return the text of a JSON object with a checksum in it, for a file that later commands read."""
    return with_checksum(json.loads(text)).decode() + "\n"


def take_checksum(content: dict[str, Any]) -> bool | None:
    """Take the checksum out of the content of JSON. Returns whether it is that of the rest; None without a
    checksum."""
    checksum = content.pop("checksum", None)
    return None if checksum is None else bool(checksum == _checksum(content))


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _footer(file: IO[bytes]) -> tuple[int, bytes]:
    # The place of a Parquet file's footer, and all bytes from there.
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - 8, 0))
    end = file.read(8)
    length = int.from_bytes(end[:4], "little") + 8
    if len(end) < 8 or end[4:] != _MAGIC or length > size:
        raise DamagedFileError("it is not a whole Parquet file")
    file.seek(size - length)
    return size - length, file.read(length)


def _place(footer: bytes) -> int:
    # The place of the seal's value in a footer: after the key, a type and a length.
    at = footer.rfind(_KEY)
    start = at + len(_KEY) + 2
    if at < 0 or start + len(_BLANK) > len(footer):
        raise DamagedFileError("it has no seal")
    return start
