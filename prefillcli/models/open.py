"""A model and its draft as they lie on disk: found, checked, with the tokenizer; no weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.errors import ResourceError, UsageError
from prefillcli.models.samples import sample_model
from prefillcli.runtime import log
from prefillcli.runtime.threads import Threads

if TYPE_CHECKING:  # torch takes seconds to import; wrong input should not wait for it
    import torch

    from prefillcli.models.adapters import AdapterFiles
    from prefillcli.models.find import ModelFiles


class ModelChoice(Protocol):
    """Which model is to be opened, and where it will run."""

    @property
    def model(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def head(self) -> Literal["auto", "vocabulary", "probability", "value"]: ...
    @property
    def threads(self) -> int | Literal["auto"]: ...


class DraftChoice(ModelChoice, Protocol):
    """The same, with the draft model that is to be opened beside it, if any. One that `drafts_itself` needs none."""

    @property
    def draft(self) -> str | None: ...
    @property
    def draft_tokenizer(self) -> Literal["same", "translate"]: ...
    @property
    def drafts_itself(self) -> bool: ...


class LabelChoice(Protocol):
    """Which labels are asked for, and whether somebody has: else they are the default."""

    @property
    def labels(self) -> str | Sequence[str]: ...
    @property
    def labels_given(self) -> bool: ...


class WeightsChoice(Protocol):
    """Whether weights are loaded whole, and how much memory they may take."""

    @property
    def weights(self) -> Literal["auto", "resident", "stream"]: ...
    @property
    def weights_memory(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a model and its draft, checked; no weights. `max_length` is the longest prompt in tokens.

    `threads` are those of this process, where it is the one that computes. Of the `adapters` there is one for all
    rows, or the `adapter_column` says which a row has, if any.
    """

    files: ModelFiles
    device: torch.device
    tokenizer: Any
    draft: ModelFiles | None
    max_length: int
    threads: Threads | None = None
    drafts_itself: bool = False
    draft_tokenizer: Any = None
    """The draft's tokenizer where it is another one than the model's."""
    adapters: tuple[AdapterFiles, ...] = ()
    adapter_column: str | None = None

    @property
    def adapter_by_row(self) -> bool:
        """Whether each row has one of the adapters or none."""
        return self.adapter_column is not None

    @property
    def compresses(self) -> bool:
        """Whether a draft, or the model itself, picks tokens."""
        return self.draft is not None or self.drafts_itself


def open_model(choice: ModelChoice) -> tuple[ModelFiles, torch.device]:
    """Find and check the model and its device.

    Raises UsageError or ResourceError.
    """
    from prefillcli.models.find import find_model, read_model_files
    from prefillcli.runtime.devices import choose_device

    if choice.model is None:
        path = sample_model()
        log.warning(f"no --model given; the sample model in {path} is for demonstration")
    else:
        path = find_model(choice.model, choice.revision)
    device = choose_device(choice.device)
    files = read_model_files(
        path,
        dtype=choice.dtype,
        device=device.type,
        trust_remote_code=choice.trust_remote_code,
        head=choice.head,
    )
    return files, device


def open_models(choice: DraftChoice) -> Opened:
    """`open_model`, and its tokenizer and the draft. Raises UsageError or ResourceError."""
    from prefillcli.models.find import find_model, read_model_files

    threads = Threads(choice.threads)
    files, device = open_model(choice)
    tokenizer = _load_tokenizer(files, choice.trust_remote_code)
    small = other = None
    if choice.draft is not None and not choice.drafts_itself:
        small = read_model_files(
            find_model(choice.draft, option="--draft"),
            dtype=choice.dtype,
            device=device.type,
            trust_remote_code=choice.trust_remote_code,
        )
        if small.head is not None:
            raise UsageError(
                f"--draft {choice.draft}: it has a classification head, and a draft is a causal language model\n"
                "take another draft, or --draft self"
            )
        check_walkable(small, "take another draft")
        check_loadable(small, device)
        other = _other_tokenizer(tokenizer, _load_tokenizer(small, choice.trust_remote_code), choice)
    return Opened(files, device, tokenizer, small, files.max_length, threads, choice.drafts_itself, other)


def _other_tokenizer(tokenizer: Any, own: Any, choice: DraftChoice) -> Any:
    """The draft's `own` tokenizer, or None if it is the model's. Raises UsageError if it cannot be used."""
    from prefillcli.models.tokenizers import difference

    wrong = difference(tokenizer, own)
    if wrong is None:
        return None
    if choice.draft_tokenizer == "same":
        raise UsageError(
            f"--draft {choice.draft}: its tokenizer is not the model's: {wrong}\n"
            "--draft-tokenizer translate lets it read the prompts in its own tokens"
        )
    if getattr(own, "backend_tokenizer", None) is None:
        raise UsageError(
            f"--draft {choice.draft}: --draft-tokenizer translate needs a tokenizer that says where its tokens lie in "
            "a text\nconvert it to a tokenizer.json, or take another draft"
        )
    return own


def answer_labels(opened: Opened, choice: LabelChoice) -> Labels:
    """The labels of a job: tokens of the vocabulary, or classes of the model's head. Raises UsageError."""
    if opened.files.head is None:
        return Labels(opened.tokenizer, parse_labels(choice.labels))
    from prefillcli.models.heads import class_labels

    return class_labels(opened.files.head, choice.labels if choice.labels_given else None)


def check_walkable(files: ModelFiles, advice: str) -> None:
    """Raise UsageError, with this advice, for a family that is known not to be walked layer by layer."""
    from prefillcli.models.families import UNWALKED

    if why := UNWALKED.get(files.family):
        raise UsageError(
            f"{files.origin}: a model of type {files.family} cannot be walked layer by layer: it {why}\n{advice}"
        )


def check_loadable(files: ModelFiles, device: torch.device) -> None:
    """Raise UsageError or UnsupportedModelError for quantised weights that cannot be loaded on the device.

    On stderr, say what becomes of those that can, where they are not computed with as they are.
    """
    from prefillcli.models.quantised import plan_quantisation
    from prefillcli.prefill.forest import UnsupportedModelError

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
    from prefillcli.models.tokenizers import load_tokenizer

    said = f"{files.origin}: cannot load the tokenizer"
    embedded = files.config.vocab_size
    return load_tokenizer(files.path, embedded=embedded, trust_remote_code=trust_remote_code, said=said)


def weights_of(opened: Opened, *, draft: bool = True) -> int:
    """Bytes of the device's free memory that the model's weights will take, with those of its adapters, and with
    those of the `draft` or without."""
    from prefillcli.models.adapters import adapter_bytes
    from prefillcli.models.weights import weight_bytes

    every = (opened.files, opened.draft if draft else None)
    return sum(weight_bytes(files, opened.device) for files in every if files is not None) + adapter_bytes(opened)


def refuse_what_cannot_fit(opened: Opened, *, draft: bool = True) -> None:
    """Raise ResourceError if it is certain that the device has no room for the weights, those of the `draft` too."""
    from prefillcli.runtime.memory import loadable_memory

    need, most = weights_of(opened, draft=draft), loadable_memory(opened.device)
    if most is not None and need > most:
        and_draft = " and those of the draft" if draft and opened.draft is not None else ""
        raise ResourceError(
            f"{opened.files.origin}: the weights{and_draft} take "
            f"{need / 2**30:.1f} GiB in {str(opened.files.dtype).removeprefix('torch.')}, and {opened.device} has "
            f"{most / 2**30:.1f} GiB free; take a smaller model, or another --dtype or --device"
        )
