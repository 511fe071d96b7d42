"""Adapters merged into a loaded model, and exchanged for one another.

PEFT finds each tensor's place and computes the sum to add there. The model keeps its modules: while an adapter is
merged, some of their parameters hold other tensors. Afterwards they hold the model's own tensors again, the very same
ones. So nothing drifts, however often adapters are exchanged."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefillcli.errors import PrefillError, UsageError, brief, out_of_resource
from prefillcli.models.decision_models import (
    SAYS_SO,
    TEMPERATURES,
    read_layout,
    read_temperatures,
    require_layout,
)
from prefillcli.models.files import quoted, read_header, read_object
from prefillcli.options.reading import AdapterOptions
from prefillcli.prompts.settings import RowColumns
from prefillcli.rows.proof import ModelContents, hash_value
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError
from prefillcli.runtime import log
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefillcli.models.find import ModelFiles
    from prefillcli.models.open import Opened, UseVariant

    Slot = tuple[nn.Module, str]  # a module and the name of one of its parameters

# torch is imported where it is used: messages about misspelt options do not need it

_NAME = "default"  # of each adapter, in PEFT


class LoadedAdapter:
    """An adapter with its tensors loaded, and their places in a model, which stays as it is.

    Raises UsageError where a part of the adapter has no place in the model.
    """

    def __init__(self, model: PreTrainedModel, files: AdapterFiles) -> None:
        self.files = files
        modules = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
        with _quiet():
            wrapped = _wrapped(model, files)
            _load_into(wrapped, files)
        self._layers, self._replaced = _parts_of(wrapped)
        vars(model).pop("peft_config", None)
        for module, children, parameters in modules:
            module._modules = children
            for name, own in parameters.items():
                now = module._parameters[name]
                if now is not own and now is not None:  # saved beside the low-rank parts: a bias, or an embedding
                    self._replaced.append(((module, name), now.data))
            module._parameters = parameters
        for part in (*self._layers, *(module for (module, _), _ in self._replaced)):
            part.requires_grad_(False)
        # The parameters that it changes.
        slots = [*(slot for slot, _ in self._replaced), *self._slots_of_layers()]
        self.slots = list({(id(module), name): (module, name) for module, name in slots}.values())

    def merge(self) -> None:
        """Change the model's tensors. Each of its `slots` must hold its own tensor."""
        import torch

        with torch.no_grad():
            for slot, tensor in self._replaced:
                _parameter(slot).data.copy_(tensor)
            for layer in self._layers:
                layer.merge(adapter_names=[_NAME])
                layer.merged_adapters.clear()  # the next use begins with the model's tensors again

    def _slots_of_layers(self) -> Iterator[Slot]:
        for layer in self._layers:
            base = layer.get_base_layer()
            own = getattr(layer, "parameter_name", None)
            for name, parameter in base._parameters.items():
                if parameter is not None and own in (None, name):
                    yield base, name


class ExchangedAdapters:
    """A model whose adapters take turns. It begins without one."""

    def __init__(self, model: PreTrainedModel, adapters: Sequence[AdapterFiles]) -> None:
        self._loaded = {each.name: LoadedAdapter(model, each) for each in adapters}
        self._own: list[tuple[Slot, Tensor]] = []
        self._active: str | None = None
        for each in self._loaded.values():
            for slot in each.slots:
                _untie(model, slot)

    def use(self, name: str | None) -> None:
        """Merge this adapter into the model; None: restore the model as it was loaded."""
        if name == self._active:
            return
        for slot, tensor in self._own:
            _parameter(slot).data = tensor
        self._own, self._active = [], None
        if name is None:
            return
        adapter = self._loaded[name]
        for slot in adapter.slots:
            parameter = _parameter(slot)
            self._own.append((slot, parameter.data))
            parameter.data = parameter.data.clone()
        self._active = name
        adapter.merge()


@contextmanager
def _quiet() -> Iterator[None]:
    # Silences warnings of PEFT and of the packages that it looks for: those that matter become errors here.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _wrapped(model: PreTrainedModel, files: AdapterFiles) -> Any:
    # PEFT's model around `model`, with the adapter's tensors on the meta device. Raises UsageError.
    from peft import PeftModel

    try:
        return PeftModel(model, copy.deepcopy(files.config), adapter_name=_NAME, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT does not check a configuration, and fails somewhere later
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        raise UsageError(f"{OPTION} {files.path}: it does not fit the model: {brief(error)}") from None


def _load_into(wrapped: Any, files: AdapterFiles) -> None:
    # Read the adapter's tensors. Raises UsageError unless each has its place, and each place its tensor.
    try:
        found = wrapped.load_adapter(files.path, _NAME, torch_device="cpu", low_cpu_mem_usage=True)
    except KeyError as error:
        raise UsageError(f"{OPTION} {files.path}: its file lacks {error.args[0]}") from None
    except Exception as error:
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        lines = str(error).splitlines()
        wrong = next((line.strip() for line in lines if "size mismatch" in line), brief(error))
        raise UsageError(f"{OPTION} {files.path}: it does not fit the model: {wrong}") from None
    for keys, what in (
        (found.unexpected_keys, "has no place in the model"),
        (found.missing_keys, "is not in its file"),
    ):
        if keys:
            name = keys[0].removeprefix("base_model.model.").replace(f".{_NAME}", "")
            more = f" ({len(keys) - 1:,} more)" if len(keys) > 1 else ""
            raise UsageError(f"{OPTION} {files.path}: {name}{more} {what}\nis it an adapter of this model?")


def _parts_of(wrapped: Any) -> tuple[list[Any], list[tuple[Slot, Tensor]]]:
    # The layers of PEFT that can be merged, and the tensors that take the place of the model's.
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: list[Any] = []
    replaced: list[tuple[Slot, Tensor]] = []
    for module in wrapped.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_NAME]
            for (inner, name), (other, _) in zip(_slots(module.original_module), _slots(saved), strict=True):
                replaced.append(((inner, name), _parameter((other, name)).data))
        elif isinstance(module, BaseTunerLayer):
            layers.append(module)
    return layers, replaced


def _slots(model: nn.Module) -> Iterator[Slot]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name


def _parameter(slot: Slot) -> nn.Parameter:
    module, name = slot
    parameter = module._parameters[name]
    if parameter is None:
        raise ValueError(f"{type(module).__name__} has no {name}")
    return parameter


def _untie(model: PreTrainedModel, slot: Slot) -> None:
    # Give the slot its own parameter: a shared one, like a tied embedding, would change elsewhere too.
    from torch import nn

    module, name = slot
    own = _parameter(slot)
    if sum(_parameter(each) is own for each in _slots(model)) > 1:
        module._parameters[name] = nn.Parameter(own.data, requires_grad=False)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OPTION = "--adapter"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_TOKENIZER = "tokenizer_config.json"
# The adapter tasks that fit the kind of model that reads the prompts.
_TASKS = {
    "causal language model (CAUSAL_LM)": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "classification head (SEQ_CLS)": (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_CLS"),
}
#: Keys of a configuration that cannot become part of the weights if their value is not empty, and why.
_NOT_MERGED = {
    "alora_invocation_tokens": "it acts only after its invocation tokens",
    "arrow_config": "it chooses among adapters token by token",
    "layer_replication": "it adds layers to the model",
    "kasa_config": "PEFT cannot merge it",
    "monteclora_config": "PEFT cannot merge it",
    "use_bdlora": "PEFT cannot merge it",
    "use_qalora": "it is for quantised weights",
    "megatron_config": "it is for a model of Megatron",
}
#: Ways to initialise an adapter from the model's weights that change these weights as well.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


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


@dataclass(frozen=True, slots=True)
class AdapterVariants:
    """The `Variants` of a model with adapters: one for all rows, or one for each row, named in its `column`."""

    files: tuple[AdapterFiles, ...]
    column: str | None

    def memory_bytes(self, device: torch.device) -> int:
        merged = max(each.merged_bytes for each in self.files)
        if self.column is None:  # the changed tensors are released; mapped files take no memory
            return merged if device.type == "cpu" else 0
        return merged + sum(each.bytes for each in self.files)

    def apply(self, model: PreTrainedModel) -> UseVariant | None:
        adapters = ExchangedAdapters(model, self.files)
        if self.column is not None:
            return adapters.use
        adapters.use(self.files[0].name)
        return None

    @property
    def row_columns(self) -> RowColumns | None:
        return None if self.column is None else RowColumns((self.column,), self._assign)

    def _assign(self, prompts: list[Prompt], batch: RowBatch, errors: dict[int, RowError]) -> list[Prompt]:
        # The prompts of a batch with their variants; a prompt whose row names no known adapter becomes an error.
        values = batch.columns.get(self.column or "")
        if values is None:
            return prompts
        place = {row: at for at, row in enumerate(batch.rows.tolist())}
        known = {each.name for each in self.files}
        done = []
        for prompt in prompts:
            value = values[place[prompt.row]]
            if value is None or value == "":
                done.append(prompt)
            elif (name := str(value)) in known and type(value) in (str, int):
                prompt.variant = name
                done.append(prompt)
            else:
                shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
                errors[prompt.row] = RowError(
                    ErrorCode.UNKNOWN_ADAPTER, f"{self.column} is {shown}: {OPTION} does not give it"
                )
        return done


def open_adapters(
    opened: Opened,
    folders: Mapping[str, str],
    column: str | None,
    *,
    layout: str = "auto",
    trust_remote_code: bool = False,
) -> Opened:
    """Open the same model with adapters. `folders` has their folders, or names on the hub, by adapter name. They are
    checked against the model's configuration; its weights are not read.

    The `column` names each row's adapter; None: one adapter reads all rows. If that one brings another tokenizer, it
    replaces the model's. Raises UsageError for an adapter that cannot be merged, with the reason.
    """
    require_extra("peft", OPTION)
    if opened.files.quantised is not None:
        raise UsageError(
            f"{OPTION}: the weights of {opened.files.origin} are quantised, and merging would round them once more\n"
            "take the model that the adapter was trained on in float, or leave the adapter out"
        )
    reader = list(_TASKS)[opened.files.head is not None]
    paths = {name: find_adapter(given) for name, given in folders.items()}
    for folder in paths.values():
        require_layout(folder, OPTION, layout)
    found = [_read_adapter(name, folder, reader) for name, folder in paths.items()]
    opened = _with_tokenizer(opened, found, by_row=column is not None, trust_remote_code=trust_remote_code)
    opened = opened if layout == "generic" else _asked_as(opened, found, by_row=column is not None)
    return replace(opened, variants=AdapterVariants(tuple(_checked(each, opened.files) for each in found), column))


def _asked_as(opened: Opened, adapters: list[AdapterFiles], *, by_row: bool) -> Opened:
    # With the layout of an adapter, or its temperatures: those of the model were fitted without one. Raises UsageError
    # for an adapter that reads some rows alone, and for a model with another layout.
    layout, heats = None, dict[str, float]()
    for adapter in adapters:
        layout, heats = read_layout(adapter.path, opened.tokenizer), dict(read_temperatures(adapter.path))
        if by_row and (heats or layout is not None):
            what = f"{TEMPERATURES} is" if layout is None else f"layout ({layout.form.type}) is"
            raise UsageError(
                f"{OPTION} {adapter.path}: its {what} for its own rows, and rows of several adapters are asked alike\n"
                "score its rows in a separate job, or leave that out with --layout generic"
            )
        if layout is not None and opened.layout is not None:
            raise UsageError(
                f"{OPTION} {adapter.path}: it has a layout of its own ({layout.form.type}), and so has the model "
                f"({opened.layout.form.type})\ntake the model that it was trained on"
            )
    if layout is not None:
        return replace(opened, layout=layout, temperatures={})
    return replace(opened, temperatures=heats)


def local_adapter(name: str) -> Path | None:
    """Return the folder of an adapter; None for the name of a hub repository. Raises UsageError where it is
    neither."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(f"{OPTION} {name}: no such folder")
    return None


_ALLOWED = CONFIG, WEIGHTS, "*token*.json", "*.jinja", "*.model"


def find_adapter(name: str) -> Path:
    """Return the `local_adapter`, or else a snapshot of the hub repository. Raises UsageError."""
    if (path := local_adapter(name)) is not None:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_ALLOWED, *SAYS_SO]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"{OPTION} {name}: not found locally or on the hub ({brief(error)})") from None


def _read_adapter(name: str, folder: Path, reader: str) -> AdapterFiles:
    # The content of an adapter's folder. Raises UsageError if it cannot be merged into any model.
    if not (folder / CONFIG).is_file():
        advice = "\nit has a model: give it as --model" if (folder / "config.json").is_file() else ""
        raise UsageError(f"{OPTION} {folder}: no {CONFIG}, so this is not an adapter of PEFT{advice}")
    if not (folder / WEIGHTS).is_file():
        pickles = [each for each in _PICKLES if (folder / each).is_file()]
        found = f" (found {pickles[0]}, which is not read: only safetensors is)" if pickles else ""
        raise UsageError(f"{OPTION} {folder}: no {WEIGHTS}{found}")
    content = read_object(folder / CONFIG)
    _refuse_kind(folder, content, reader)
    tensors = read_header(folder / WEIGHTS).values()
    _refuse_large_ranks(folder, content, max((side for each in tensors for side in each["shape"]), default=0))
    size = sum(end - begin for begin, end in (each["data_offsets"] for each in tensors))
    return AdapterFiles(name, folder, _config_of(folder, content), size)


def _refuse_kind(folder: Path, content: Mapping[str, Any], reader: str) -> None:
    # Raise UsageError for a configuration of something else than a LoRA that can be merged.
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
    # Raise UsageError for ranks above the `longest` side of the adapter's tensors: PEFT makes tensors of these sizes.
    by_name = content.get("rank_pattern")
    for rank in (content.get("r"), *(by_name.values() if isinstance(by_name, dict) else ())):
        if isinstance(rank, int | float) and not rank <= longest:
            raise UsageError(
                f"{folder / CONFIG}: a rank of {quoted(rank)}, and no tensor of {WEIGHTS} has a side longer than "
                f"{longest:,}"
            )


def _config_of(folder: Path, content: Mapping[str, Any]) -> Any:
    # PEFT's configuration. Raises UsageError; a warning names keys that this PEFT does not know.
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
    # Load the adapter into the model without weights, to see that each part finds its place. Raises UsageError.
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(adapter.path / WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                if not torch.isfinite(file.get_tensor(name)).all():
                    raise UsageError(f"{adapter.path / WEIGHTS}: {name} has numbers that are not finite")
    except SafetensorError as error:
        raise UsageError(f"{adapter.path / WEIGHTS}: {brief(error)}") from None
    changed = sum(_parameter(slot).numel() for slot in LoadedAdapter(empty_model(files), adapter).slots)
    return replace(adapter, merged_bytes=changed * files.dtype.itemsize)


def empty_model(files: ModelFiles) -> PreTrainedModel:
    """Return the model that `load_weights` makes of the files, on the meta device."""
    from prefillcli.models.completeness import build_empty
    from prefillcli.models.multimodal import read_config, text_part

    whole = read_config(files.path)
    return build_empty(whole, files.head, text_part(whole) if files.part_of is not None else None, files.dtype)


def _with_tokenizer(opened: Opened, adapters: list[AdapterFiles], *, by_row: bool, trust_remote_code: bool) -> Opened:
    # Takes the adapter's tokenizer where one adapter reads all rows. Raises UsageError for one that does not fit.
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
                "rows of several adapters are tokenised alike: score its rows in a separate job"
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


def adapter_paths(opened: Opened | None) -> dict[str, str]:
    """Return the folders of a model's adapters, by the adapters' names."""
    variants = None if opened is None else opened.variants
    return {each.name: str(each.path) for each in variants.files} if isinstance(variants, AdapterVariants) else {}


def identity(
    adapters: AdapterOptions, opened: Opened, values: dict[str, Any], contents: Callable[[Path], ModelContents]
) -> str:
    """Return the digest of the adapters by their contents. Their options go out of the `values`."""
    for name in ("adapter", "adapter_column"):
        del values[name]
    found = [(name, contents(Path(path))) for name, path in adapter_paths(opened).items()]
    hashed = sorted([name, files.model(), files.tokenizer()] for name, files in found)
    return hash_value([hashed, adapters.adapter_column])
