"""Models in GGUF format: opened without reading a weight, and their weights as numbers that torch computes with.

transformers reads the file, which takes seconds for a small model and minutes for a large one. So what it makes of it
is kept as an ordinary model folder (`prefillcli.models.gguf_cache`): first configuration and tokenizer, then, once a
job loads them, the weights in the dtype of the run.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as reader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prefillcli.data.proof.fingerprints import ModelContents, hash_value
from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import require_complete
from prefillcli.models.empty import bounded
from prefillcli.models.gguf_cache import find_cached, make_cached, make_once
from prefillcli.models.gguf_checks import check_parts, check_tensors, complete_config
from prefillcli.models.gguf_header import GgufHeader, GgufTensor, read_gguf_header, write_joined
from prefillcli.models.transformers_log import quiet_transformers
from prefillcli.runtime.extras import require_extra
from prefillcli.runtime.user_cache import cache_folder

_FORMAT = 2  # of what is cached
_TOKENIZER_BYTES = 64 << 20  # a large one as files
_SHARD = "2GB"  # of the cached weights: so much is copied in memory while it is written
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_FULL = ("No space left on device", "Disk quota exceeded", "File too large")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model's GGUF files, checked. `origin` is the file or folder that the user named.

    `contents` are the files as they were when they were opened, `digest` stands for what prefill makes of them.
    """

    origin: Path
    parts: tuple[GgufHeader, ...]
    contents: ModelContents
    digest: str

    @property
    def tensors(self) -> Iterator[GgufTensor]:
        """Those of all files."""
        return (tensor for part in self.parts for tensor in part.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """What the file's numbers are computed in: as they are saved, or bfloat16 where they are quantised."""
        kinds = {tensor.kind for tensor in self.tensors}
        if kinds <= _FLOATS.keys():
            return next((_FLOATS[kind] for kind in (30, 1) if kind in kinds), torch.float32)
        return torch.bfloat16

    def cached_name(self, dtype: torch.dtype | None = None) -> str:
        """The name in the cache: of configuration and tokenizer, or of the whole model in a `dtype`."""
        stem = re.sub(r"[^\w.-]", "_", self.parts[0].path.stem)[:60]
        return f"{stem}-{self.digest[:24]}" + (f"-{dtype}".replace("torch.", "") if dtype else "")


def open_gguf(path: Path, files: Sequence[Path]) -> GgufModel:
    """Check the GGUF `files` that `path` names. Reads their headers, and hashes them unless their digest is known.

    Raises UsageError for files that are damaged or cannot be read, and where the packages for it are missing.
    """
    require_extra("gguf", f"{path}: GGUF")
    contents = ModelContents(path)
    contents.begin()
    parts = tuple(read_gguf_header(file) for file in files)
    check_parts(parts)
    made_by = [_FORMAT, version("transformers"), version("gguf")]
    return GgufModel(path, parts, contents, hash_value([contents.model(), *made_by]))


def describe_gguf(model: GgufModel) -> Path:
    """A folder with the model's configuration and tokenizer. Raises UsageError for what transformers cannot read."""
    make = partial(_describe, model)
    return make_cached(model.cached_name(), make, size=_TOKENIZER_BYTES) or make_once(make)


def dequantise_gguf(model: GgufModel, folder: Path, dtype: torch.dtype) -> Path | None:
    """A folder with the whole model in `dtype`, made if it is not there; None where the cache has no room for it.

    `folder` is that of `describe_gguf`. Raises UsageError and ResourceError.
    """
    size = _TOKENIZER_BYTES + dtype.itemsize * sum(tensor.numbers for tensor in model.tensors)
    return make_cached(model.cached_name(dtype), partial(_dequantise, model, folder, dtype), size=size)


def find_dequantised(model: GgufModel, dtype: torch.dtype) -> Path | None:
    """The folder of `dequantise_gguf`, if it is there."""
    return find_cached(model.cached_name(dtype))


def load_gguf(
    model: GgufModel, folder: Path, dtype: torch.dtype, attention: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in memory, on the CPU, and what transformers says of loading it. `folder` as in `dequantise_gguf`.

    Raises UsageError, and OSError where the disk is full.
    """
    with _reading(model), _whole_file(model.parts) as file:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=AutoConfig.from_pretrained(folder),
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    model.contents.require_unchanged()
    vars(loaded.config).pop("quantization_config", None)  # it is quantised no more
    loaded.hf_quantizer = None
    return loaded, info


def _describe(model: GgufModel, folder: Path) -> None:
    """Write configuration and tokenizer into `folder`."""
    header = model.parts[0]
    with _reading(model), _whole_file(model.parts, data=False) as file:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        complete_config(model.parts, config)
        config._name_or_path = ""
        if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            held = [tensor.numbers for tensor in model.tensors]
            with torch.device("meta"), bounded(header.path, sum(held), len(held)):
                empty = AutoModelForCausalLM.from_config(config)
            numbers = {id(each): each.numel() for each in empty.state_dict(keep_vars=True).values()}
            check_tensors(model.parts, config, sum(numbers.values()), _names(header, config, empty))
            config.architectures = [type(empty).__name__]
        config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        _begin_texts(tokenizer, header)
        tokenizer.save_pretrained(folder)
    model.contents.require_unchanged()
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{header.path}: it has no tokenizer that transformers reads; take the model as safetensors")


def _names(header: GgufHeader, config: Any, model: PreTrainedModel) -> Collection[str]:
    """What transformers calls the tensors in a file of this model; those of joined experts lack their `.weight`."""
    kind = reader.TENSOR_PROCESSORS.get(header.architecture, reader.TensorProcessor)
    found: dict[str, str] = reader.get_gguf_hf_weights_map(model, kind(config=config.to_dict()))
    return found


def _begin_texts(tokenizer: Any, header: GgufHeader) -> None:
    """Let the tokenizer begin texts with BOS where the file says so, which transformers does not read from GGUF."""
    begins = header.fields.get("tokenizer.ggml.add_bos_token", header.fields.get("tokenizer.ggml.model") == "llama")
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if not begins or bos is None or tokenizer("a")["input_ids"][:1] == [number]:
        return
    backend = tokenizer.backend_tokenizer
    first = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, number)]
    )
    before = backend.post_processor
    backend.post_processor = first if before is None else processors.Sequence([before, first])


def _dequantise(model: GgufModel, described: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write the whole model into `folder`."""
    loaded, info = load_gguf(model, described, dtype, None)
    require_complete(model.origin, loaded, info)
    with _reading(model):
        loaded.save_pretrained(folder, max_shard_size=_SHARD)
        for file in described.iterdir():
            if file.is_file() and not (folder / file.name).exists():
                (folder / file.name).write_bytes(file.read_bytes())


@contextmanager
def _reading(model: GgufModel) -> Iterator[None]:
    """No progress bars. Errors name the file; those of a full disk and full memory pass."""
    import gguf

    bar: Callable[..., Any] = reader.tqdm
    names: Callable[..., Any] = gguf.get_tensor_name_map
    reader.tqdm = partial(bar, disable=True)
    gguf.get_tensor_name_map = cache(names)  # transformers has it make the same map for each module of a model
    try:
        with quiet_transformers():
            yield
    except PrefillError:
        raise
    except Exception as error:  # the reader raises anything for files that it does not know
        if any(text in str(error) for text in _FULL):
            raise OSError(28, "no space left on the device") from None
        if out_of_resource(error):
            raise
        family = model.parts[0].architecture
        raise UsageError(
            f"{model.origin}: transformers cannot read this {family!r} model from GGUF: {brief(error)}\n"
            "take the model as safetensors"
        ) from None
    finally:
        reader.tqdm = bar
        gguf.get_tensor_name_map = names


@contextmanager
def _whole_file(parts: Sequence[GgufHeader], *, data: bool = True) -> Iterator[Path]:
    """The one file of a model, or one that its parts are joined in for as long as it is read."""
    if len(parts) == 1:
        yield parts[0].path
        return
    place = cache_folder() / "gguf"
    with tempfile.TemporaryDirectory(prefix="joined-", dir=place if data and place.is_dir() else None) as folder:
        file = Path(folder, parts[0].path.name)
        try:
            write_joined(parts, file, data=data)
        except OSError as error:
            raise ResourceError(f"{parts[0].path}: its parts cannot be joined in {folder}: {error.strerror}") from None
        yield file
