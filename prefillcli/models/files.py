"""Safetensors files: their headers, and whether a directory holds the weights of the model in its config.json.

Only headers are read, without torch. The checks raise UsageError that names the file. Also the description of a
reranker in its files, as sentence-transformers saves them."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.rows.filesystems import refuse_pointer

#: Tokens that a family embeds beside those of its vocabulary.
EXTRA_TOKENS = {"mllama_text_model": 8, "moshi": 1}

# The places of the tensors in a file.


def check_ranges(ranges: Iterable[tuple[int, int, str]], size: int, *, alignment: int = 1) -> None:
    """Raise ValueError unless the tensors of a file fill its `size` bytes of data one after the other.

    `ranges` are the first byte of each tensor, the byte after its last, and its name, in any order. Each begins at a
    multiple of `alignment`, and fewer bytes than that lie between two of them and after the last one.
    """
    end, before = 0, ""
    for begin, stop, name in sorted(ranges):
        if begin % alignment:
            raise ValueError(f"{name} begins at byte {begin:,} of the data, which is not a multiple of {alignment}")
        if begin < end:
            raise ValueError(f"{name} and {before} share bytes")
        if begin - end >= alignment:
            raise ValueError(f"{begin - end:,} bytes before {name} belong to no tensor")
        end, before = stop, name
    if end > size:
        raise ValueError(f"truncated: {size:,} bytes of data, {before} ends after {end:,}")
    if size - end >= alignment:
        raise ValueError(f"{size - end:,} bytes at its end belong to no tensor")


_MOST_HEADER = 100 << 20  # bytes, as the safetensors library has it
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2,
               "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_WHOLE_NUMBERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})

_WHOLE_FILE = "model.safetensors"
READOUT = "readout.safetensors"  # in the folder of a decision model, the rows of its answers
_EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def find_weights(folder: Path) -> list[Path]:
    """Find the safetensors files of a model directory. Raises UsageError for another directory."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: no config.json, so this is not a model directory{_of_adapter(folder)}")
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"{folder}: has an adapter beside the model (adapter_config.json), which transformers merges where "
            "PEFT is installed\nmove it into its own folder, and give that as --adapter if it is to be merged"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        if gguf := sorted(folder.glob("*.gguf")):
            raise UsageError(f"{folder}: no .safetensors file\ngive the GGUF file itself: {gguf[0]}")
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        found = f" (found {', '.join(others[:3])}, which is not read: only safetensors and GGUF are)" if others else ""
        raise UsageError(f"{folder}: no .safetensors file{found}")
    return weights


def _of_adapter(folder: Path) -> str:
    # Advice, if it is the folder of an adapter.
    file = folder / "adapter_config.json"
    found = read_json(file) if file.is_file() else None
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    named = f", which names its model {quoted(base)}" if isinstance(base, str) and base else ""
    advice = f"\nit has an adapter: give the model as --model, and this as --adapter{named}"
    return advice if file.is_file() else ""


def read_tensors(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Read the names and descriptions of the tensors that are loaded from a model's `files`.

    Raises UsageError for files that are not whole, or missing.
    """
    headers = {file.name: read_header(file) for file in files}
    index = folder / "model.safetensors.index.json"
    if _WHOLE_FILE in headers:  # transformers loads this one, whatever other files there are
        headers = {_WHOLE_FILE: headers[_WHOLE_FILE]}
    elif index.is_file():
        headers = {place: headers[place] for place in _check_index(index, headers)}
    tensors = {name: tensor for header in headers.values() for name, tensor in header.items()}
    if len(tensors) != sum(map(len, headers.values())):
        twice = next(name for name in tensors if sum(name in header for header in headers.values()) > 1)
        raise UsageError(f"{folder}: two of its files hold {quoted(twice)}; files of two models are mixed up")
    return tensors


def check_weights(folder: Path, tensors: Mapping[str, Any], config: Any, *, quantised: bool) -> None:
    """Refuse weights, `quantised` or not, of a model other than that of `config`, the text model's configuration."""
    for name, tensor in tensors.items():
        if tensor["dtype"] in _WHOLE_NUMBERS and name.endswith(".weight") and not quantised:
            raise UsageError(
                f"{folder}: {quoted(name)} is saved as whole numbers ({tensor['dtype']}), and config.json does not "
                "say how they are quantised\ntake the config.json that belongs to these weights"
            )
    numbered = {number for name in tensors if (number := layer_number(name)) is not None}
    counts = (getattr(config, name, None) for name in ("num_hidden_layers", "num_layers", "num_hidden_groups"))
    # longcat also counts halves of layers, and albert has fewer layers than it goes through
    layers = min((each for each in counts if isinstance(each, int)), default=0)
    if numbered and layers > max(numbered) + 1:
        raise UsageError(f"{folder}: config.json has {layers:,} layers, the weights have {max(numbered) + 1:,}")
    embeddings = [tensor["shape"] for name, tensor in tensors.items() if name.endswith(_EMBEDDING)]
    wide = getattr(config, "word_embed_proj_dim", None) or getattr(config, "hidden_size", None)
    if len(embeddings) == 1 and len(embeddings[0]) == 2 and wide and not hasattr(config, "embedding_size"):
        rows, width = embeddings[0]
        if (rows - EXTRA_TOKENS.get(config.model_type, 0), width) != (config.vocab_size, wide):
            raise UsageError(
                f"{folder}: the shapes of the weights are not those of config.json: {rows:,} tokens of {width:,} "
                f"numbers are embedded, not {config.vocab_size:,} of {wide:,}"
            )


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a model directory that transformers loads; some directories hold a second
    copy."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        return sorted(path / name for name in names if (path / name).is_file())
    return []


def lacks_vocabulary(folder: Path) -> bool:
    """Return whether a model has a readout instead of a head for its vocabulary. Raises UsageError for files that are
    not whole."""
    headers = map(read_header, weight_files(folder) if (folder / READOUT).is_file() else ())
    names = [name for header in headers for name in header]
    return bool(names) and not any(name.endswith("lm_head.weight") for name in names)


def read_header(file: Path) -> dict[str, Any]:
    """Read the names and descriptions of the tensors in a safetensors file. Raises UsageError unless the file is
    whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size, _MOST_HEADER):
                raise ValueError("no header")
            header: dict[str, Any] = json.loads(stream.read(length))
        _check_metadata(header.pop("__metadata__", None))
        ranges = [_range_of(name, tensor) for name, tensor in header.items()]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{file}: not a safetensors file ({why})") from None
    try:
        check_ranges(ranges, size - 8 - length)
    except ValueError as error:
        raise UsageError(f"{file}: damaged: {error}\ncopy or download it again") from None
    return header


def data_start(file: Path) -> int:
    """Return where the tensors' bytes begin in a safetensors file that `read_header` has accepted."""
    with file.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def _check_index(index: Path, headers: dict[str, dict[str, Any]]) -> set[str]:
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise UsageError(f"{index}: no weight_map, which maps each tensor to its file")
    for name, place in places.items():
        if place not in headers:
            raise UsageError(f"{index}: names {quoted(place)}, which is missing; the model is not complete")
        if name not in headers[place]:
            raise UsageError(f"{index}: maps {quoted(name)} to {place}, which does not hold it")
    return set(places.values())


def _check_metadata(found: Any) -> None:
    # Raise ValueError for metadata that the safetensors library does not take.
    texts = found is None or (isinstance(found, dict) and all(isinstance(value, str) for value in found.values()))
    if not texts:
        raise ValueError(f"its metadata is {quoted(found)}, not a mapping of texts")


def _range_of(name: str, tensor: dict[str, Any]) -> tuple[int, int, str]:
    # The place of a tensor in the data of its file. Raises ValueError if its shape and its bytes do not agree.
    begin, end = tensor["data_offsets"]
    shape = tensor["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{quoted(name)} has no shape or no place")
    width = _ITEM_BYTES.get(tensor["dtype"])
    if end < begin or (width is not None and end - begin != prod(shape) * width):
        raise ValueError(f"{quoted(name)} has {end - begin:,} bytes, which its shape {quoted(shape)} does not take")
    return begin, end, name


def layer_number(name: str) -> int | None:
    """Return the first number in a tensor's name, which is that of its layer."""
    return next((int(part) for part in name.split(".") if part.isdecimal() and len(part) < 10), None)


_MOST_JSON = 32 << 20  # bytes of a JSON file; the largest configurations have some hundred kilobytes
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
#: The least and the largest allowed value of a configuration's whole numbers, under the names of all families.
_WHOLE = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), (1, 1 << 24)),
    **dict.fromkeys(_LAYERS, (1, 4096)),
    **dict.fromkeys(
        ("num_mtp_layers", "num_nextn_predict_layers", "num_residual_layers", "encoder_layers"), (0, 4096)
    ),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 1 << 16)),
    **dict.fromkeys(("head_dim",), (1, 1 << 16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (0, 1 << 40)),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window"), (0, 1 << 40)),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "attention_chunk_size"), (1, 1 << 24)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 16)),
}
_REAL = frozenset({"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rope_theta"})
_READ = (".json", ".jinja", ".model", ".py", ".safetensors", ".tiktoken", ".txt")  # endings of a model's files
# Files that transformers reads whole.
_TEXTS = frozenset(
    {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
     "chat_template.json", "chat_template.jinja", "tokenizer.model", "spiece.model", "processor_config.json",
     "preprocessor_config.json"}
)  # fmt: skip
_POSITIVE = frozenset({"query_pre_attn_scalar"})  # a root is divided by
_SHARES = frozenset({"partial_rotary_factor", "rotary_pct", "rotary_percentage"})  # of a head's width
CLASSIFIER = "ForSequenceClassification"  # how the names of such classes end
_OTHER_PARTS = ("vision", "audio", "quantization")  # with other numbers under the same names


def check_files(folder: Path) -> None:
    """Refuse a model's folder with a device, a pipe or a pointer instead of a file, or with too large a text."""
    for file in folder.iterdir():
        if file.suffix in _READ and file.exists() and not file.is_dir():
            _check_size(file, _MOST_JSON if file.name in _TEXTS else None)
            refuse_pointer(file)


GGUF_MAGIC = b"GGUF"
_LEAST_GGUF = 24  # bytes of a header


def check_gguf(path: Path) -> None:
    """Refuse a file that is no GGUF file by its first bytes, or a pointer instead of one."""
    refuse_pointer(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < _LEAST_GGUF:
                raise UsageError(f"{path}: not a GGUF file: {size} bytes")
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise UsageError(f"{path}: not a GGUF file")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def refuse_code_elsewhere(folder: Path) -> None:
    """Refuse a model whose code is in another repository of a hub: it would be fetched, and no fingerprint has it."""
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        content = read_json(file) if file.is_file() else None
        named = content.get("auto_map") if isinstance(content, dict) else None
        for name in _texts(named):
            if "--" in name:
                raise UsageError(
                    f"{file}: auto_map names code of {name.partition('--')[0][:60]}, which is not in this folder\n"
                    "copy that code into the folder and name it without the repository"
                )


def check_config(path: Path, longest: int | None = None) -> None:
    """Refuse a `config.json` with numbers that no model has, at any depth, or classes that are not names.

    `longest` is the longest side of a tensor in the model's files, where they are known.
    """
    content = read_object(path)
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"{path}: architectures is {quoted(names)}; it must be a list of names")
    for name, value, apart in _entries(content):
        if value is None or isinstance(value, list | dict):
            continue
        if name == "num_labels" and type(value) is int and value > (longest or value):
            raise UsageError(
                f"{path}: {name} is {quoted(value)}, and no tensor of the weights has more than {longest:,} rows"
            )
        if apart and not (name in _LAYERS and isinstance(value, int) and value > _WHOLE[name][1]):
            continue
        if name in _WHOLE:
            low, high = _WHOLE[name]
            if type(value) is not int or not low <= value <= high:
                raise UsageError(
                    f"{path}: {name} is {quoted(value)}; it must be a whole number from {low:,} to {high:,}"
                )
        elif name in _POSITIVE and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise UsageError(f"{path}: {name} is {quoted(value)}; it must be a finite number above 0")
        elif name in _SHARES and (type(value) not in (int, float) or not 0 <= value <= 1):
            raise UsageError(f"{path}: {name} is {quoted(value)}; it must be a number from 0 to 1")
        elif name in _REAL and (type(value) not in (int, float) or not math.isfinite(value) or value < 0):
            raise UsageError(f"{path}: {name} is {quoted(value)}; it must be a finite number, not below 0")


def check_generation_config(path: Path) -> None:
    """Refuse a `generation_config.json` that is not a mapping; it may be missing."""
    if path.is_file():
        read_object(path)


def names_classifier(config: Any) -> bool:
    """Return whether the content of a `config.json` names a class with a head of sequence classification."""
    names = config.get("architectures") if isinstance(config, dict) else None
    return any(str(name).endswith(CLASSIFIER) for name in names or ())


def has_classes(model: Path, head: str) -> bool:
    """Return whether a head's classes are read from the model in a folder or file, by `--head`."""
    if head in ("probability", "value"):
        return True
    config = model / "config.json"
    return head == "auto" and config.is_file() and names_classifier(read_json(config))


def brings_code(folder: Path) -> bool:
    """Return whether a model's folder names Python code for its model or tokenizer, which runs only where it is
    trusted."""
    files = [folder / name for name in ("config.json", "tokenizer_config.json")]
    return any("auto_map" in read_json(file) for file in files if file.is_file())


def read_json(path: Path, *, most: int = _MOST_JSON) -> Any:
    """Read the content of a JSON file of at most `most` bytes. Raises UsageError."""
    try:
        _check_size(path, most)
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: not JSON: {why}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that has an object. Raises UsageError."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UsageError(f"{path}: not a JSON object")
    return found


def _entries(content: Any) -> Iterator[tuple[str, Any, bool]]:
    # All names with their values, at any depth, and whether they are of a part that does not read text, or of
    # quantisation.
    waiting = [(content, False)]
    while waiting:
        value, apart = waiting.pop()
        if isinstance(value, dict):
            for name, part in value.items():
                yield name, part, apart
                waiting.append((part, apart or any(other in name for other in _OTHER_PARTS)))
        elif isinstance(value, list):
            waiting.extend((part, apart) for part in value)


def _check_size(path: Path, most: int | None) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: not a regular file")
    if most is not None and found.st_size > most:
        raise UsageError(f"{path}: {found.st_size:,} bytes; at most {most:,} are read")


def _texts(content: Any) -> Iterator[str]:
    # All texts in a JSON value but for names of entries.
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _texts(each)


def quoted(value: Any) -> str:
    """Return `value` as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def positive(value: Any, place: str, cure: str = "") -> float:
    """Return a number above 0 that a file has at a `place`. Raises UsageError for anything else, with the `cure`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError("\n".join(filter(None, [f"{place} is {quoted(value)}, and must be a number above 0", cure])))
    return float(value)


# The sample models.


def sample_model(typed: bool = False) -> Path:
    """Return the directory of the shipped target model, or of the one that answers `typed` questions: inside an
    installed wheel, or in the repository. Raises UsageError."""
    found = _find("models/tickets" if typed else "models/target")
    if found is None:
        raise UsageError("no --model given, and the sample model did not come with this installation")
    return found


def sample_draft() -> Path | None:
    """Return the directory of the draft of `sample_model`; None if this installation lacks it."""
    return _find("models/draft")


def sample_rows() -> Path | None:
    """Return the file with the rows that `prefill bench` compares by default; None if this installation lacks it."""
    return _find("post_recommendation.parquet")


def _find(name: str) -> Path | None:
    package = Path(__file__).parent.parent
    for root in (package, package.parent):
        path = root / "samples" / name
        if path.is_file() or (path / "config.json").is_file():
            return path
    return None


# `modules.json` of a reranker names a `LogitScore`, whose folder has the ids of the two tokens that are compared. The
# chat template renders messages of the roles query and document, and `config_sentence_transformers.json` has the
# instruction, which is the system message.
LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


@dataclass(frozen=True, slots=True)
class Reranker:
    """A reranker as its files describe it. `tokens` are compared for its score, the positive one first; a head has
    none, and of one token alone the logit is the score."""

    tokens: tuple[int, ...] | None
    instruction: str | None
    begins_answer: bool  # whether its chats end where the assistant begins to speak


def read_reranker(folder: Path) -> Reranker | None:
    """Read the reranker that the files in a model's folder describe; None if they describe none. Raises
    UsageError."""
    modules, about = (_json_of(folder / name) for name in ("modules.json", "config_sentence_transformers.json"))
    named = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    paths = [str(each.get("path")) for each in named if each.get("type") == LOGIT_SCORE]
    about = about if isinstance(about, dict) else {}
    if not paths and about.get("model_type") != "CrossEncoder":
        return None
    tokens = None
    if paths:
        file = folder / Path(paths[0]).name / "config.json"  # never outside the folder
        found = _json_of(file)
        ids = [found.get(name) for name in ("true_token_id", "false_token_id")] if isinstance(found, dict) else [None]
        tokens = tuple(each for each in ids if type(each) is int)
        if type(ids[0]) is not int:
            raise UsageError(f"{file}: it names no true_token_id, the token whose logit is the model's score")
    prompts, name = about.get("prompts"), about.get("default_prompt_name")
    instruction = prompts.get(name) if isinstance(prompts, dict) and name is not None else None
    given = _json_of(folder / "sentence_bert_config.json")
    for key in ("processing_kwargs", "chat_template", "add_generation_prompt"):
        given = given.get(key) if isinstance(given, dict) else None
    return Reranker(tokens, instruction if isinstance(instruction, str) else None, given is True)


def _json_of(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
