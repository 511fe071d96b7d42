"""Checks of a model's JSON files before anything is built from them.

Each raises a UsageError that names the file.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError

_MOST_JSON = 32 << 20  # bytes of a JSON file; the largest configurations have some hundred kilobytes
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
#: Least and most of the whole numbers that a configuration must not have otherwise, under the names of all families.
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
_TEXTS = frozenset(
    {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
     "chat_template.json", "chat_template.jinja", "tokenizer.model", "spiece.model", "processor_config.json",
     "preprocessor_config.json"}
)  # fmt: skip
"""Files that transformers reads whole."""
_POSITIVE = frozenset({"query_pre_attn_scalar"})  # a root is divided by
_SHARES = frozenset({"partial_rotary_factor", "rotary_pct", "rotary_percentage"})  # of a head's width
CLASSIFIER = "ForSequenceClassification"  # how the names of such classes end
_OTHER_PARTS = ("vision", "audio", "quantization")  # with numbers of their own under the same names


def check_files(folder: Path) -> None:
    """Refuse a model's folder with a device or a pipe in the place of a file, or with a text too large to be read."""
    for file in folder.iterdir():
        if file.suffix in _READ and file.exists() and not file.is_dir():
            _check_size(file, _MOST_JSON if file.name in _TEXTS else None)


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
    """Refuse a `config.json` with numbers that no model has, at any depth, or classes that are no names.

    `longest` is the longest side of a tensor in the model's files, where they are known.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path}: not a JSON object")
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
    """Refuse a `generation_config.json` that is not a mapping; there need not be any."""
    if path.is_file() and not isinstance(read_json(path), dict):
        raise UsageError(f"{path}: not a JSON object")


def names_classifier(config: Any) -> bool:
    """Whether the content of a `config.json` names a class with a head of sequence classification."""
    names = config.get("architectures") if isinstance(config, dict) else None
    return any(str(name).endswith(CLASSIFIER) for name in names or ())


def brings_code(folder: Path) -> bool:
    """Whether a model's folder names Python code for its model or tokenizer, which runs only where it is trusted."""
    files = [folder / name for name in ("config.json", "tokenizer_config.json")]
    return any("auto_map" in read_json(file) for file in files if file.is_file())


def read_json(path: Path, *, most: int = _MOST_JSON) -> Any:
    """The content of a JSON file of at most `most` bytes. Raises UsageError."""
    try:
        _check_size(path, most)
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: not JSON: {why}") from None


def _entries(content: Any) -> Iterator[tuple[str, Any, bool]]:
    """All names with their values, at any depth, and whether they are of a part that does not read text, or of
    quantisation."""
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
    """All texts in a JSON value but for names of entries."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _texts(each)


def quoted(value: Any) -> str:
    """`value` as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The sample models.


def sample_model() -> Path:
    """Directory of the shipped target model: inside an installed wheel, or in the repository. Raises UsageError."""
    found = _find("target")
    if found is None:
        raise UsageError("no --model given, and the sample model did not come with this installation")
    return found


def sample_draft() -> Path | None:
    """Directory of the draft of `sample_model`; None if it did not come with this installation."""
    return _find("draft")


def _find(name: str) -> Path | None:
    package = Path(__file__).parent.parent
    for root in (package, package.parent):
        path = root / "samples" / "models" / name
        if (path / "config.json").is_file():
            return path
    return None
