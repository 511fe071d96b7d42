"""Models of several kinds with one number changed in a file that describes them.

Their scores are those of transformers' own forward with this number, or those of the model as it was where nothing
depends on it. Else they are refused.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prefillcli.models.gguf_header import read_gguf_header
from tests.adapters import peft_model, save_adapter
from tests.fuzz.command import prefill
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace
from tests.gguf_files import write_gguf
from tests.jobs.models import save_model

TOLERANCE = 1e-4
"""Of a score, in float32."""
_PROMPTS = ["The fox. Answer:", "Answer:", "Yes\nNo and so on, for more than a window of tokens: Yes or no?"]
_NUMBERS = (0, 1, -1, 10**6, 10**10)
_FILES = ("config.json", "config.json", "config.json", "tokenizer_config.json", "generation_config.json")
_TINY = {"hidden": 16, "layers": 2}
_MAMBA = {
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state"), 4),
    **{"mamba_expand": 1, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_d_conv": 4},
}
_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {**_ROPE, "original_max_position_embeddings": 64}},
    "gemma": {
        "family": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        **{"sliding_window": 8, "query_pre_attn_scalar": 4},
    },
    "experts": {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "hybrid": {
        "family": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention"],
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 32},
        **_MAMBA,
    },
    "classes": {"classifies": True, "num_labels": 2, "pad_token_id": 1},
    "adapted": {},
    "gguf": {},
}


def _check(drawn: Any, place: Workplace) -> None:
    kind, name, at, number, flags = drawn
    for each in ("model", "adapter"):
        if (source := _made(place.folder, kind) / each).exists():
            shutil.copytree(source, each)
    change = _change_gguf if kind == "gguf" else _change_json
    if not change(Path("adapter" if name == "adapter_config.json" else "model"), name, at, number):
        return
    found = _score(*flags)
    intact = _intact(place.folder, kind)
    for row, before, prompt in zip(found, intact, _PROMPTS, strict=False):
        if row["error"] is None and abs(row["score"] - before) > TOLERANCE:
            wanted = _oracle(kind)(prompt)
            assert abs(row["score"] - wanted) < TOLERANCE, (row["score"], wanted, before)


def _score(*flags: str) -> list[dict[str, Any]]:
    """The rows that the command makes of the prompts, if it makes any."""
    pq.write_table(pa.table({"prompt": _PROMPTS}), "in.parquet")
    (model,) = [*Path("model").glob("*.gguf")] or [Path("model")]
    words = ("-m", str(model), *(("--adapter", "adapter") if Path("adapter").exists() else ()), *flags)
    run = prefill("score", "in.parquet", "-o", "out.parquet", "--quiet", *words)
    return require_all_rows(run, "in.parquet", len(_PROMPTS))


@cache
def _made(folder: Path, kind: str) -> Path:
    """A folder with the model of a kind, and its adapter."""
    own = folder / "models" / kind
    saved = save_model(own / ("source" if kind == "gguf" else "model"), **{**_TINY, **_KINDS[kind]})
    if kind == "adapted":
        save_adapter(saved, own / "adapter", rank_pattern={"v_proj": 2})
    if kind == "gguf":
        (own / "model").mkdir()
        write_gguf(own / "model" / "model.gguf", saved)
    return own


@cache
def _intact(folder: Path, kind: str) -> Sequence[float]:
    """The scores of the model as it was."""
    before = Path.cwd()
    own = folder / "intact" / kind
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(_made(folder, kind), own)
    try:
        os.chdir(own)
        return [row["score"] for row in _score()]
    finally:
        os.chdir(before)


def _change_json(folder: Path, name: str, at: int, number: int) -> bool:
    """Put a number in one of the places of a JSON file that have one; gives whether there is any."""
    file = folder / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    places = list(_numbers(content))
    if places:
        holder, key = places[at % len(places)]
        holder[key] = number
        file.write_text(json.dumps(content))
    return bool(places)


def _numbers(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Holders and keys of all numbers in a JSON value."""
    for key in range(len(holder)) if isinstance(holder, list) else holder:
        if isinstance(holder[key], list | dict):
            yield from _numbers(holder[key])
        elif type(holder[key]) in (int, float):
            yield holder, key


def _change_gguf(folder: Path, name: str, at: int, number: int) -> bool:
    """Put a number, as near as 32 bits have it, in one of the settings of a GGUF file that have one."""
    file = folder / "model.gguf"
    header, data = read_gguf_header(file), bytearray(file.read_bytes())
    places = [(setting, raw) for setting, raw in header.raw.items() if type(header.fields[setting]) in (int, float)]
    setting, raw = places[at % len(places)]
    form = "<f" if isinstance(header.fields[setting], float) else "<I"
    end = data.index(raw) + len(raw)
    data[end - 4 : end] = struct.pack(form, number if form == "<f" else min(number % 2**40, 2**32 - 1))
    file.write_bytes(data)
    return True


def _oracle(kind: str) -> Callable[[str], float]:
    """What transformers' own forward, with its own reading of the files, gives as the score of a prompt."""
    folder = Path("model")
    options = {"gguf_file": "model.gguf"} if kind == "gguf" else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if kind == "adapted":
        model = peft_model.__wrapped__(folder, Path("adapter"))
    else:
        family = AutoModelForSequenceClassification if kind == "classes" else AutoModelForCausalLM
        model = family.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **options).eval()

    def score(prompt: str) -> float:
        with torch.inference_mode():
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            logits = model(input_ids=ids, use_cache=False).logits
        chosen = [1, 0] if kind == "classes" else [tokenizer.encode(f" {each}")[-1] for each in ("Yes", "No")]
        return float(torch.softmax(logits.reshape(-1, logits.shape[-1])[-1][chosen].double(), dim=-1)[0])

    return score


@st.composite
def _examples(draw: st.DrawFn) -> tuple[str, str, int, int, tuple[str, ...]]:
    kind = draw(st.sampled_from(list(_KINDS)))
    name = draw(st.sampled_from(_FILES if kind != "adapted" else ("adapter_config.json",)))
    flags = draw(st.sampled_from([(), (), ("--engine", "hf"), ("--deterministic",)])) if kind != "adapted" else ()
    return kind, name, draw(st.integers(0, 60)), draw(st.sampled_from(_NUMBERS)), flags


NUMBERS = Fuzzer("numbers", _examples(), _check, per_round=60)
