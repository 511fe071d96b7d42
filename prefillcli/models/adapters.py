"""LoRA adapters as PEFT saves them: found, and checked before the weights of the model are read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.errors import UsageError, brief
from prefillcli.models.files import quoted, read_json
from prefillcli.models.safetensors import read_header
from prefillcli.runtime import log
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:  # these take torch along
    from transformers import PreTrainedModel

    from prefillcli.models.find import ModelFiles
    from prefillcli.models.open import Opened

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OPTION = "--adapter"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_TOKENIZER = "tokenizer_config.json"
_TASKS = {
    "causal language model (CAUSAL_LM)": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "classification head (SEQ_CLS)": (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS"),
}
"""The tasks of adapters that fit what reads the prompts."""
#: What of a configuration cannot become part of the weights, and why; each where its value is not empty.
_NOT_MERGED = {
    "alora_invocation_tokens": "it acts only behind its invocation tokens",
    "arrow_config": "it chooses among adapters token by token",
    "layer_replication": "it adds layers to the model",
    "kasa_config": "PEFT cannot merge it",
    "monteclora_config": "PEFT cannot merge it",
    "use_bdlora": "PEFT cannot merge it",
    "use_qalora": "it is for quantised weights",
    "megatron_config": "it is for a model of Megatron",
}
#: Ways of initialising an adapter that take its first values out of the model's weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterChoice(Protocol):
    """Which adapters are to be merged."""

    @property
    def adapter(self) -> Mapping[str, str]:
        """Folders or hub names of adapters, by the adapters' names."""

    @property
    def adapter_column(self) -> str | None:
        """The column that names each row's adapter; None: there is one adapter at most, for all rows."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its folder describes it. `config` is PEFT's configuration.

    Its own tensors take `bytes`, and the model's tensors that it changes `merged_bytes`.
    """

    name: str
    path: Path
    config: Any
    bytes: int
    merged_bytes: int = 0


def open_adapters(opened: Opened, choice: AdapterChoice, trust_remote_code: bool = False) -> Opened:
    """The same model with the adapters of `choice`, checked against its configuration; no weights of it are read.

    The tokenizer is that of the adapter where one is for all rows and has another. Raises UsageError for an adapter
    that cannot be merged, with the reason.
    """
    if not choice.adapter:
        return opened
    require_extra("peft", OPTION)
    _refuse_quantised(opened.files)
    reader = list(_TASKS)[opened.files.head is not None]
    found = {name: _read_adapter(name, find_adapter(given), reader) for name, given in choice.adapter.items()}
    by_row = choice.adapter_column is not None
    opened = _with_tokenizer(opened, list(found.values()), by_row=by_row, trust_remote_code=trust_remote_code)
    checked = [_checked(each, opened.files) for each in found.values()]
    return replace(opened, adapters=tuple(checked), adapter_column=choice.adapter_column)


def local_adapter(name: str) -> Path | None:
    """The folder of an adapter; None for the name of a hub repository. Raises UsageError where it is neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(f"{OPTION} {name}: no such folder")
    return None


def find_adapter(name: str) -> Path:
    """`local_adapter`, else a snapshot of the hub repository. Raises UsageError."""
    if (path := local_adapter(name)) is not None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS, "*token*.json", "*.jinja", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"{OPTION} {name}: not found locally or on the hub ({brief(error)})") from None


def adapter_bytes(opened: Opened) -> int:
    """Bytes of the device's memory that the adapters of a model take, beside its weights."""
    if not opened.adapters:
        return 0
    merged = max(each.merged_bytes for each in opened.adapters)
    if not opened.adapter_by_row:  # the tensors that are changed are let go; mapped files take no memory
        return merged if opened.device.type == "cpu" else 0
    return merged + sum(each.bytes for each in opened.adapters)


def _refuse_quantised(files: ModelFiles) -> None:
    if files.quantised is not None:
        raise UsageError(
            f"{OPTION}: the weights of {files.origin} are quantised, and merging would round them once more\n"
            "take the model that the adapter was trained on in float, or leave the adapter out"
        )


def _read_adapter(name: str, folder: Path, reader: str) -> AdapterFiles:
    """What an adapter's folder says by itself. Raises UsageError for what cannot be merged into any model."""
    if not (folder / CONFIG).is_file():
        advice = "\nit has a model: give it as --model" if (folder / "config.json").is_file() else ""
        raise UsageError(f"{OPTION} {folder}: no {CONFIG}, so this is not an adapter of PEFT{advice}")
    if not (folder / WEIGHTS).is_file():
        pickles = [each for each in _PICKLES if (folder / each).is_file()]
        found = f" (found {pickles[0]}, which is not read: only safetensors is)" if pickles else ""
        raise UsageError(f"{OPTION} {folder}: no {WEIGHTS}{found}")
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict):
        raise UsageError(f"{folder / CONFIG}: not a JSON object")
    _refuse_kind(folder, content, reader)
    tensors = read_header(folder / WEIGHTS).values()
    _refuse_large_ranks(folder, content, max((side for each in tensors for side in each["shape"]), default=0))
    size = sum(_bytes_of(each) for each in tensors)
    return AdapterFiles(name, folder, _config_of(folder, content), size)


def _refuse_kind(folder: Path, content: Mapping[str, Any], reader: str) -> None:
    """Raise UsageError for a configuration of something else than a LoRA that can be merged."""
    kind, task = content.get("peft_type"), content.get("task_type")
    why = None
    if kind != "LORA":
        why = f"its peft_type is {quoted(kind)}, and only LORA is merged"
    elif task not in _TASKS[reader]:
        why = f"its task_type is {quoted(task)}, and prompts are read by a {reader}"
    for key, reason in _NOT_MERGED.items():
        if why is None and content.get(key):
            why = f"it cannot be merged: {key}: {reason}"
    start = content.get("init_lora_weights")
    if why is None and isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        why = (
            f"it begins with {quoted(start)} and needs the model's weights changed in the same way\n"
            "save it with path_initial_model_for_weight_conversion, which makes it an adapter of the model itself"
        )
    if why is not None:
        raise UsageError(f"{OPTION} {folder}: {why}")


def _refuse_large_ranks(folder: Path, content: Mapping[str, Any], longest: int) -> None:
    """Raise UsageError for ranks above the `longest` side of the adapter's tensors: PEFT makes tensors of them."""
    by_name = content.get("rank_pattern")
    for rank in (content.get("r"), *(by_name.values() if isinstance(by_name, dict) else ())):
        if isinstance(rank, int | float) and not rank <= longest:
            raise UsageError(
                f"{folder / CONFIG}: a rank of {quoted(rank)}, and no tensor of {WEIGHTS} has a side longer than "
                f"{longest:,}"
            )


def _config_of(folder: Path, content: Mapping[str, Any]) -> Any:
    """PEFT's configuration. Raises UsageError; what this PEFT does not know is told on stderr."""
    from dataclasses import fields

    from peft import LoraConfig

    known = {field.name for field in fields(LoraConfig)}
    unknown = sorted(content.keys() - known - {"peft_type", "runtime_config"})
    if unknown:
        from importlib.metadata import version

        log.warning(
            f"{folder / CONFIG}: peft {version('peft')} does not know {', '.join(unknown[:5])}; "
            "if the adapter was made with a newer one, install that"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig(**{name: value for name, value in content.items() if name in known - {"peft_type"}})
    except Exception as error:  # each of its fields may be of any type
        raise UsageError(f"{folder / CONFIG}: {brief(error)}") from None
    config.inference_mode = True
    config.init_lora_weights = False  # all of them are read
    return config


def _checked(adapter: AdapterFiles, files: ModelFiles) -> AdapterFiles:
    """The adapter, loaded into the model without weights to see that all of it finds a place. Raises UsageError."""
    import torch
    from safetensors import SafetensorError, safe_open

    from prefillcli.models.adapter_merging import LoadedAdapter

    try:
        with safe_open(adapter.path / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise UsageError(f"{adapter.path / WEIGHTS}: {name} has numbers that are not finite")
    except SafetensorError as error:
        raise UsageError(f"{adapter.path / WEIGHTS}: {brief(error)}") from None
    loaded = LoadedAdapter(empty_model(files), adapter)
    return replace(adapter, merged_bytes=loaded.merged_numbers * files.dtype.itemsize)


def empty_model(files: ModelFiles) -> PreTrainedModel:
    """The model that `load_weights` makes of the files, on the meta device."""
    from transformers import AutoConfig

    from prefillcli.models.completeness import build_empty
    from prefillcli.models.multimodal import text_part

    whole = AutoConfig.from_pretrained(files.path)
    return build_empty(whole, files.head, text_part(whole) if files.part_of is not None else None, files.dtype)


def _with_tokenizer(opened: Opened, adapters: list[AdapterFiles], *, by_row: bool, trust_remote_code: bool) -> Opened:
    """With the tokenizer of the adapter where one is for all rows. Raises UsageError for one that does not fit."""
    from prefillcli.models.open import difference, load_tokenizer

    for adapter in adapters:
        if not (adapter.path / _TOKENIZER).is_file():
            continue
        said = f"{OPTION} {adapter.path}: cannot load its tokenizer"
        embedded = opened.files.config.vocab_size
        own = load_tokenizer(adapter.path, embedded=embedded, trust_remote_code=trust_remote_code, said=said)
        tokens = difference(opened.tokenizer, own)
        chats = getattr(own, "chat_template", None) != getattr(opened.tokenizer, "chat_template", None)
        other = tokens or ("another chat template" if chats else None)
        if other is None:
            continue
        if by_row:
            raise UsageError(
                f"{OPTION} {adapter.path}: its tokenizer is not the model's: {other}\n"
                "rows of several adapters are tokenised alike: score its rows in a job of their own"
            )
        if tokens and opened.draft is not None and opened.draft_tokenizer is None:
            raise UsageError(f"{OPTION} {adapter.path}: its tokenizer is not the draft's: {tokens}")
        most = max(own.get_vocab().values(), default=0)
        if most >= opened.files.config.vocab_size:
            raise UsageError(
                f"{OPTION} {adapter.path}: its tokenizer has the token {most:,}, and the model's vocabulary ends "
                f"before {opened.files.config.vocab_size:,}\n"
                "merge it with PEFT, which resizes the embedding, and give the merged model"
            )
        return replace(opened, tokenizer=own)
    return opened


def _bytes_of(tensor: Mapping[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    return int(end - begin)
