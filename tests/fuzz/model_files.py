"""Models whose files are damaged: configurations, tokenizers, chat templates, weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from tests.fuzz.command import prefill
from tests.fuzz.damage import byte_edits, edited, value_edits, with_values
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.outputs import require_all_rows
from tests.fuzz.workplace import Workplace

_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_FLAGS = st.sampled_from([(), ("--weights", "stream"), ("--dtype", "bfloat16"), ("--engine", "hf"), ("--dry-run",)])


def _check(drawn: Any, place: Workplace) -> None:
    change, name, edits, flags = drawn
    folder = Path(shutil.copytree(place.chat_model, "model"))
    file = folder / name
    if change == "values":
        file.write_text(json.dumps(with_values(json.loads(file.read_text()), edits)))
    elif change == "header":
        file.write_bytes(_with_header(file.read_bytes(), edits))
    else:
        file.write_bytes(edited(file.read_bytes(), edits))
    prompts = ["The fox.</s> Answer:", "Answer:", None, "Yes\nNo <s>"]
    pq.write_table(pa.table({"prompt": prompts}), "in.parquet")
    run = prefill("score", "in.parquet", "-m", str(folder), "-o", "out.parquet", "--quiet", *flags)
    if "--dry-run" not in flags:
        require_all_rows(run, "in.parquet", len(prompts))


def _with_header(data: bytes, edits: Any) -> bytes:
    """A safetensors file with another header before the same weights."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(with_values(json.loads(data[8:end]), edits)).encode()
    return len(header).to_bytes(8, "little") + header + data[end:]


_CHANGES = st.one_of(
    st.tuples(st.just("values"), st.sampled_from(_JSON), value_edits),
    st.tuples(st.just("header"), st.just("model.safetensors"), value_edits),
    st.tuples(st.just("bytes"), st.sampled_from([*_JSON, "model.safetensors", "chat_template.jinja"]), byte_edits),
)
MODELS = Fuzzer("models", st.tuples(_CHANGES, _FLAGS).map(lambda drawn: (*drawn[0], drawn[1])), _check, per_round=80)
