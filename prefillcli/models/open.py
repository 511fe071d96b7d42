"""A model and its draft on disk: found, checked, with the tokenizer; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.images.numbers import FeatureNumbers
from prefillcli.models.decision_models import read_layout, read_temperatures, require_alike, require_layout
from prefillcli.models.files import (
    check_config,
    check_files,
    check_generation_config,
    check_gguf,
    find_weights,
    has_classes,
    read_json,
    refuse_code_elsewhere,
    sample_model,
)
from prefillcli.options.groups import LabelOptions, ModelOptions, WorkerOptions
from prefillcli.options.requirements import first_readers
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.labels import ClassLabels, Labels, parse_labels
from prefillcli.prompts.questions import Question, typed
from prefillcli.prompts.settings import RowColumns
from prefillcli.rows.proof import gguf_parts
from prefillcli.runtime import clock, log, memory
from prefillcli.runtime.cores import Threads
from prefillcli.runtime.extras import light_imports
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:  # these take seconds to import; wrong input should not wait for them
    import torch
    from transformers import PreTrainedModel

    from prefillcli.models.dtype import ModelReader
    from prefillcli.models.find import ModelFiles
    from prefillcli.models.heads import HeadChoice
    from prefillcli.models.images import ModelImages
    from prefillcli.prompts.layouts import Layout


# Turns a model into that variant of it; None gives the model as loaded.
UseVariant = Callable[[str | None], None]


class Variants(Protocol):
    """Variants of a model: one for all rows, or several that take turns."""

    @property
    def row_columns(self) -> RowColumns | None:
        """The column that names each row's variant, and the function that notes it in prompts; None: one variant for
        all rows."""

    def memory_bytes(self, device: torch.device) -> int:
        """Return the number of bytes of the device's memory that they take beside the model's weights."""

    def apply(self, model: PreTrainedModel) -> UseVariant | None:
        """Change the loaded model for good where one variant is for all rows; else return the function that exchanges
        variants."""


@dataclass(frozen=True, slots=True)
class Small:
    """The files of a small model beside the model, and its tokenizer where that differs from the model's.

    With `narrow` it is the model itself, in low precision.
    """

    files: ModelFiles
    tokenizer: Any = None
    narrow: Literal["int8", "fp8"] | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a model and the small ones beside it, checked; no weights. `max_length` is the longest prompt in
    tokens.

    The small ones are a draft, or the first model of a cascade and the model in low precision. `threads` are those
    of this process, if it computes itself.
    """

    files: ModelFiles
    device: torch.device
    tokenizer: Any
    small: tuple[Small, ...]
    max_length: int
    threads: Threads | None = None
    variants: Variants | None = None
    layout: Layout | None = None
    """That of a model which was trained for typed decisions, unless it is asked like any other."""
    narrow: Literal["int8", "fp8"] | None = None
    """The low precision in which the model itself computes."""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """By type of question those of a model without a layout of its own, by which its answers are divided."""
    image_bounds: tuple[int | None, int | None] = (None, None)
    """The most and the fewest pixels of an image as the model's processor prepares it, where these are not its own."""
    images_asked: bool = False
    """Whether a column of the rows has images."""
    image_numbers: FeatureNumbers = field(default_factory=FeatureNumbers, compare=False)
    """The numbers of images in prompts, whoever builds them."""

    @property
    def images(self) -> ModelImages:
        """The part of the model that reads images."""
        from prefillcli.models.images import ModelImages

        most, least = self.image_bounds
        return ModelImages(self.files, most, least, self.images_asked)

    @property
    def points(self) -> bool:
        """Whether the model's answers are read by a head that compares places of a prompt."""
        return self.layout is not None and self.layout.marker is not None

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of the model, and of the small ones that have their own files."""
        return [dtype_name(each) for each in (self.files, *(own.files for own in self.small if own.narrow is None))]

    @property
    def draft(self) -> ModelFiles | None:
        """The files of the draft, or of the first small model."""
        return self.small[0].files if self.small else None

    @property
    def draft_tokenizer(self) -> Any:
        """The draft's tokenizer, where it differs from the model's."""
        return self.small[0].tokenizer if self.small else None


def local_model(name: str, option: str) -> Path | None:
    """Return the directory or GGUF file of `name`; None for the name of a hub model.

    Raises UsageError that names the `option` where the path holds nothing, or no model.
    """
    path = Path(name).expanduser()
    if option != "--model" and (path / "adapter_config.json").is_file():
        raise UsageError(
            f"{option} {name}: an adapter, which is read with its model\n"
            f"merge it into its model with PEFT, and give the merged model as {option}"
        )
    parts = gguf_parts(path)
    for part in parts:
        check_gguf(part)
    if not parts and path.is_dir():
        find_weights(path)
        check_files(path)
        check_config(path / "config.json")
        check_generation_config(path / "generation_config.json")
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file():
        raise UsageError(f"{option} {name}: a model is a directory or a .gguf file, and this is neither")
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        what = "file" if path.suffix.lower() == ".gguf" else "directory"
        raise UsageError(f"{option} {name}: no such {what}")
    return None


def find_model(name: str, revision: str | None = None, *, option: str = "--model") -> Path:
    """Return the `local_model`, else a snapshot of the hub model (configuration, tokenizer and safetensors only)."""
    if (path := local_model(name, option)) is not None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"{option} {name}: not found locally or on the hub ({brief(error)})") from None


def open_model(lm: ModelOptions) -> tuple[ModelFiles, torch.device]:
    """Find and check the model and its device.

    Raises UsageError or ResourceError.
    """
    path, reader = _find_chosen(lm), _reader(lm, WorkerOptions())
    return reader.read(path, lm.model_head), reader.device


def _reader(lm: ModelOptions, processes: WorkerOptions, dtypes: Sequence[str] = ()) -> ModelReader:
    with light_imports():
        from prefillcli.models.dtype import ModelReader

        return ModelReader(lm, processes, dtypes)


def _find_chosen(lm: ModelOptions, *, typed: bool = False) -> Path:
    if lm.model is not None:
        found = find_model(lm.model, lm.revision)
        require_layout(found, "--model", lm.layout)
        return found
    path = sample_model(typed)
    log.warning(
        "no --model given: this is the sample model, a demonstration of a million parameters that knows nothing but "
        f"its samples ({path})\ngive a folder, a GGUF file or a hub name, like --model Qwen/Qwen3-0.6B"
    )
    return path


def asks_typed(settings: JobSettings) -> bool:
    """Return whether a command asks typed questions, which a sample model of their own answers."""
    return settings.asking.questions is not None


def dtype_name(files: ModelFiles) -> str:
    """Return the dtype that a model computes in, as `--dtype` calls it."""
    return str(files.dtype).removeprefix("torch.")


WORDS = "words"  # instead of a first model: its reading of a prompt are the words, and no model is needed


def small_models(settings: JobSettings) -> tuple[str, list[str]]:
    """Return the option that names the small models to open beside the model, and their names: a draft, or a
    first model."""
    if settings.uses_draft and settings.compression.draft is not None:
        return "draft", [settings.compression.draft]
    first = settings.exits.first
    return "first", [first] if first not in (None, WORDS) else []


def with_small(settings: JobSettings, names: Sequence[str]) -> dict[str, Any]:
    """Return the option that names the small models, as it is with other `names` for them."""
    option, before = small_models(settings)
    return {option: names[0]} if before else {}


NARROW_COPIES = 2.25  # the model's weights, those that smaller numbers are made of, and these


def open_models(settings: JobSettings, dtypes: Sequence[str] = ()) -> Opened:
    """Open a model as `open_model` does, with its tokenizer and the small models beside it; in these `dtypes`, like
    `Opened.dtypes`, if they are chosen already. Raises UsageError or ResourceError."""
    lm, (option, names) = settings.lm, small_models(settings)
    path = _find_chosen(lm, typed=asks_typed(settings))
    found = [find_model(name, option=f"--{option}") for name in names]
    for folder in found if option != "draft" else ():  # whose answers are not read
        require_layout(folder, f"--{option}", lm.layout, path)
    reader, threads = _reader(lm, settings.processes, dtypes), Threads(lm.threads)
    narrow = settings.exits.narrow if first_readers(settings) else None
    clock.step("opening the model")
    numbers = narrow or settings.narrow_walk
    streams = numbers is None and _may_stream(settings)
    files = reader.read(path, lm.model_head, copies=1 if numbers is None else NARROW_COPIES, streams=streams)
    device = reader.device
    tokenizer = _load_tokenizer(files, lm.trust_remote_code)
    layout = None if lm.layout == "generic" else read_layout(path, tokenizer)
    small = []
    for name, folder in zip(names, found, strict=True):
        own = reader.read(folder)
        if option == "draft" and own.head is not None:
            raise UsageError(
                f"--draft {name}: it has a classification head, and must be a causal language model\n"
                "take another model, or --draft self"
            )
        if not own.encoder:
            check_walkable(own, "take another small model")
        check_loadable(own, device)
        reads = _load_tokenizer(own, lm.trust_remote_code)
        if option == "first" and layout is not None and (its := read_layout(folder, reads)) is not None:
            require_alike(layout, its, f"--first {name}")
        how = settings.compression.draft_tokenizer if option == "draft" else "translate"
        other = _other_tokenizer(tokenizer, reads, f"--{option} {name}", how)
        small.append(Small(own, reads if own.encoder else other))  # an encoder reads texts with tokens around them
    if narrow is not None:
        small.append(Small(files, narrow=narrow))
    seen = settings.images
    opened = Opened(
        files,
        device,
        tokenizer,
        tuple(small),
        files.max_length,
        threads,
        narrow=settings.narrow_walk,
        image_bounds=(seen.max_pixels, seen.min_pixels),
        images_asked=bool(seen.image_column),
    )
    if (template := opened.images.chat_template) and (opened.images_asked or not tokenizer.chat_template):
        tokenizer.chat_template = template
    if lm.layout == "generic":
        return opened
    if layout is not None:
        return replace(opened, layout=layout)
    return replace(opened, temperatures=read_temperatures(path))


def _may_stream(settings: JobSettings) -> bool:
    # Whether the layers of the model may be read while others compute.
    here = settings.engine.engine == "torch" and not settings.adapters.adapter
    return here and settings.layers.weights != "resident"


def _other_tokenizer(tokenizer: Any, own: Any, said: str, how: Literal["same", "translate"]) -> Any:
    # The draft's `own` tokenizer, or None if it is the model's. Raises UsageError if it cannot be used.
    wrong = difference(tokenizer, own)
    if wrong is None:
        return None
    if how == "same":
        raise UsageError(
            f"{said}: its tokenizer is not the model's: {wrong}\n"
            "--draft-tokenizer translate lets it read the prompts in its own tokens"
        )
    if getattr(own, "backend_tokenizer", None) is None:
        raise UsageError(
            f"{said}: its tokenizer does not give the places of its tokens in a text, which reading the prompts in "
            "other tokens needs\nconvert it to a tokenizer.json, or take another model"
        )
    return own


def answer_labels(opened: Opened, answers: LabelOptions) -> Labels:
    """Return the labels of a job: tokens of the vocabulary, or classes of the model's head. Raises UsageError."""
    if opened.files.head is None:
        return Labels(
            opened.tokenizer, typed(parse_labels(answers.labels)), norm=answers.label_norm, end=answers.label_end
        )
    from prefillcli.models.heads import class_labels

    return class_labels(opened.files.head, answers.labels if answers.labels_given else None)


def named_labels(model: Path, answers: LabelOptions, head: HeadChoice) -> Labels | None:
    """Return the labels of a job with the model in a folder or file, by their names alone; None for those of a head.
    Imports no torch. Raises UsageError."""
    if has_classes(model, head):
        return None
    return label_names(typed(parse_labels(answers.labels)))


def label_names(question: Question) -> Labels:
    """Return the labels of a question without their tokens: enough to check options by."""
    found = ClassLabels(question.answers, tuple((number,) for number in range(len(question.answers))), Measure.SHARES)
    found.question = question
    return found


def check_walkable(files: ModelFiles, advice: str) -> None:
    """Raise UsageError, with this advice, for a family that is known not to be walked layer by layer."""
    from prefillcli.models.shape import UNWALKED

    if why := UNWALKED.get(files.family):
        raise UsageError(
            f"{files.origin}: a model of type {files.family} cannot be walked layer by layer: it {why}\n{advice}"
        )


def check_loadable(files: ModelFiles, device: torch.device) -> None:
    """Raise UsageError or UnsupportedModelError for quantised weights that cannot be loaded on the device.

    For those that can be loaded, report on stderr if their weights are changed before use.
    """
    from prefillcli.models.weights import plan_quantisation
    from prefillcli.walk.forest import UnsupportedModelError

    found = plan_quantisation(files.origin, files.quantised, device)
    if found is None:
        return
    if files.part_of is not None:
        raise UnsupportedModelError(
            f"{files.origin}: of a quantised {files.part_of}, the text model cannot be loaded by itself\n"
            "take the model as it was before it was quantised"
        )
    if found.kept == "unpacked":
        log.info(f"{files.origin}: weights are {found.describe(files.dtype)}")
    if found.warning is not None:
        log.warning(found.warning)


def _load_tokenizer(files: ModelFiles, trust_remote_code: bool) -> Any:

    said = f"{files.origin}: cannot load the tokenizer"
    embedded = files.config.vocab_size
    own = files.gguf is not None
    return load_tokenizer(files.path, embedded=embedded, trust_remote_code=trust_remote_code, said=said, own=own)


def weights_of(opened: Opened, *, draft: bool = True) -> int:
    """Return the number of bytes of the device's free memory that the model's weights will take, with its variants,
    and with those of the draft, or of all first models, or without."""
    from prefillcli.models.weights import weight_bytes

    every = [opened.files, *(each.files for each in opened.small if draft)]
    beside = 0 if opened.variants is None else opened.variants.memory_bytes(opened.device)
    return beside + sum(weight_bytes(files, opened.device) for files in every)


def refuse_what_cannot_fit(opened: Opened, *, draft: bool = True) -> None:
    """Raise ResourceError if the device certainly has no room for the weights, those of the `draft` included."""
    need, most = weights_of(opened, draft=draft), memory.loadable_memory(opened.device)
    if most is not None and need > most:
        and_draft = " and those of the small model beside it" if draft and opened.small else ""
        raise ResourceError(
            f"{opened.files.origin}: the weights{and_draft} take "
            f"{need / 2**30:.1f} GiB in {dtype_name(opened.files)}, and {opened.device} has "
            f"{most / 2**30:.1f} GiB free; take a smaller model, or another --dtype or --device"
        )


# Tokenizers: loaded, where their files are of a size that fits the model, and compared with one another.


_TOKENIZER = "tokenizer.json"
_VOCABULARIES = ("vocab.json", "added_tokens.json")
_BESIDE = 1 << 16  # tokens beside twice those that the model embeds
_TOKEN_BYTES = 256  # of such a file for each of them: with merges and blanks, large ones have 130

#: The entries that tokenise a text, in the files of the tokenizers library, and their names for users.
_PARTS = {
    "model": "merges or pieces",
    "normalizer": "normalisation",
    "pre_tokenizer": "splitting into words",
}


def load_tokenizer(folder: Path, *, embedded: int, trust_remote_code: bool, said: str, own: bool = False) -> Any:
    """Load transformers' tokenizer of a folder, for a model that embeds `embedded` tokens. `own`: as we saved it; of
    others transformers may know better than their files.

    Raises UsageError, whose message begins with `said`. It refuses files whose vocabulary is out of all proportion to
    the model before it loads them: the library makes tables as long as the largest id.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_files(folder)
    if trust_remote_code:
        refuse_code_elsewhere(folder)
    most = 2 * embedded + _BESIDE
    for name in (_TOKENIZER, *_VOCABULARIES):
        if (folder / name).is_file():
            _check_vocabulary(folder / name, most)
    try:
        if own:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain ones
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        raise UsageError(f"{said}: {brief(error)}") from None


def _check_vocabulary(file: Path, most: int) -> None:
    # Raise UsageError for a vocabulary of more than `most` tokens, or ids beyond.
    content = read_json(file, most=_TOKEN_BYTES * most)
    for vocabulary in _vocabularies(content) if file.name == _TOKENIZER else [content]:
        if not isinstance(vocabulary, dict | list):
            continue
        ids = vocabulary.values() if isinstance(vocabulary, dict) else ()
        largest = max((number for number in ids if type(number) is int), default=0)
        if max(len(vocabulary), largest) > most:
            what = f"{len(vocabulary):,} tokens" if len(vocabulary) > most else f"a token with the id {largest:,}"
            raise UsageError(f"{file}: has {what}; for this model it may have {most:,} at most")


def _vocabularies(content: Any) -> Iterator[Any]:
    # The tokens of a `tokenizer.json`: a mapping or a list of tokens, and the added ones.
    if isinstance(content, dict):
        model, added = content.get("model"), content.get("added_tokens")
        yield model.get("vocab") if isinstance(model, dict) else None
        if isinstance(added, list):
            yield {at: each.get("id") for at, each in enumerate(added) if isinstance(each, dict)}


def difference(target: Any, draft: Any) -> str | None:
    """Return the difference in content between two transformers tokenizers, or None.

    It compares the vocabularies, with added tokens, and the ways to tokenise text. Names and paths do not count. A
    token put before a text (BOS) does not count either: the draft reads the target's tokens.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        wrong = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        token = wrong[0]
        ids = " and ".join(str(vocabulary.get(token, "absent")) for vocabulary in (ours, theirs))
        return f"{len(wrong):,} tokens have other ids, {token!r} for one: {ids}"
    first, second = (getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (target, draft))
    if first is None or second is None:
        return None
    mine, other = (json.loads(backend.to_str()) for backend in (first, second))
    for part, name in _PARTS.items():
        if mine.get(part) != other.get(part):
            return f"the same vocabulary, but another {name}"
    return None


# The tokens that end a text, by a model's configuration and its generation configuration.


def stop_tokens(files: ModelFiles) -> frozenset[int]:
    """Return the stop tokens of a model without loaded weights. Raises UsageError for a file that is not JSON."""
    generation = files.path / "generation_config.json"
    return _ids(files.config, read_json(generation) if generation.is_file() else None)


def stop_tokens_of(model: PreTrainedModel) -> frozenset[int]:
    """Return the stop tokens of a loaded model."""
    return _ids(model.config.get_text_config(), getattr(model, "generation_config", None))


def _ids(*configurations: Any) -> frozenset[int]:
    ids: set[int] = set()
    for each in configurations:
        given = each.get("eos_token_id") if isinstance(each, dict) else getattr(each, "eos_token_id", None)
        ids.update([given] if isinstance(given, int) else given or ())
    return frozenset(ids)
