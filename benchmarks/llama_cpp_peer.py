"""llama.cpp as a contender: many sequences in a batch, logits of last tokens only, prefixes computed once.

Runs in the environment of `make setup-llamacpp`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.serving import Method, Scores, Settings, Tokens, batches, groups, share

#: llama.cpp's names of a Llama's weights. Those of a layer follow its number.
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
KINDS = {
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


@contextmanager
def llama_cpp_peer(
    model: Path, dtype: str, prompts: Sequence[Tokens], labels: tuple[int, int], kind: str, **options: Any
) -> Iterator[tuple[Method, Settings]]:
    """`kind`: BF16, Q8_0 or Q4_K. `options` are those of `Context`."""
    with closing(Context(converted(model, kind), prompts, **options)) as context:
        yield lambda: context.scores(prompts, labels), {"kind": kind, **options}


def converted(model: Path, kind: str) -> Path:
    """The model as GGUF of this kind, in a folder beside it; made if it is not there yet."""
    folder = model.with_name(f"{model.name}-gguf")
    folder.mkdir(exist_ok=True)
    whole, wanted = folder / "BF16.gguf", folder / f"{kind}.gguf"
    if not whole.exists():
        write_gguf(model, whole)
    if not wanted.exists():
        quantize(whole, wanted, kind)
    return wanted


class Context:
    """A model and its cache, on as many threads as there are cores.

    `batch_tokens` are computed at once, of at most `sequences` rows; `micro_batch` of them pass a layer together.
    `unified`: all sequences have one buffer of K,V, so that prefixes are shared without a copy.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Tokens],
        *,
        batch_tokens: int,
        micro_batch: int,
        sequences: int,
        unified: bool,
        flash: bool,
        threads: int,
    ) -> None:
        self.batch_tokens, self.sequences, self.unified = batch_tokens, sequences, unified
        self.groups = list(groups(prompts))
        longest = max(map(len, prompts))
        shared = max(shared for shared, _ in self.groups)
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if self.model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max = sequences + 1 if shared else sequences  # one more holds the prefix
        room = longest if not unified else shared + max(longest - shared, batch_tokens)
        settings.n_ctx = room if unified else -(-room // 256) * 256 * settings.n_seq_max
        settings.n_batch, settings.n_ubatch = batch_tokens, micro_batch
        settings.n_threads = settings.n_threads_batch = threads
        settings.kv_unified = unified
        settings.flash_attn_type = int(flash)
        settings.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if self.context is None:
            raise RuntimeError("llama.cpp makes no context with these settings")
        self.memory = llama_cpp.llama_get_memory(self.context)

    def scores(self, prompts: Sequence[Tokens], labels: tuple[int, int]) -> Scores:
        """P(first label) among the labels."""
        logits = np.empty((len(prompts), len(labels)), np.float32)
        for shared, rows in self.groups:
            llama_cpp.llama_memory_clear(self.memory, False)
            self._decode([(0, 0, prompts[rows[0]][:shared])])
            first = 1 if shared else 0
            lengths = [len(prompts[row]) - shared for row in rows]
            for batch in batches(lengths, self.batch_tokens, self.sequences):
                if not shared:
                    llama_cpp.llama_memory_clear(self.memory, False)
                for place in range(first, first + len(batch)) if shared else ():
                    llama_cpp.llama_memory_seq_rm(self.memory, place, -1, -1)
                    llama_cpp.llama_memory_seq_cp(self.memory, 0, place, -1, -1)
                read = [(first + place, shared, prompts[rows[at]][shared:]) for place, at in enumerate(batch)]
                for at, numbers in zip(batch, self._decode(read), strict=True):
                    logits[rows[at]] = [numbers[label] for label in labels]
        return share(logits)

    def _decode(self, parts: Sequence[tuple[int, int, Tokens]]) -> list[Any]:
        """Compute (sequence, position of the first token, tokens) at once, or one that is longer in several steps.

        The logits of each one's last token.
        """
        tokens = np.concatenate([each for _, _, each in parts]).astype(np.int32)
        positions = np.concatenate([at + np.arange(len(each)) for _, at, each in parts]).astype(np.int32)
        sequences = np.repeat([number for number, _, _ in parts], [len(each) for _, _, each in parts]).astype(np.int32)
        last = np.cumsum([len(each) for _, _, each in parts]) - 1
        if not len(tokens):
            return []
        wanted = np.zeros(len(tokens), np.int8)
        wanted[last] = 1
        pointers = (sequences.ctypes.data + 4 * np.arange(len(tokens))).astype(np.uint64)
        ones = np.ones(len(tokens), np.int32)
        begin = 0
        for begin in range(0, len(tokens), self.batch_tokens):
            part = slice(begin, begin + self.batch_tokens)
            batch = llama_cpp.llama_batch(
                n_tokens=len(tokens[part]),
                token=_at(tokens[part], ctypes.c_int32),
                embd=None,
                pos=_at(positions[part], ctypes.c_int32),
                n_seq_id=_at(ones[part], ctypes.c_int32),
                seq_id=_at(pointers[part], ctypes.POINTER(ctypes.c_int32)),
                logits=_at(wanted[part], ctypes.c_int8),
            )
            if code := llama_cpp.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode: {code}")
        return [llama_cpp.llama_get_logits_ith(self.context, int(at) - begin) for at in last]

    def close(self) -> None:
        """Free both."""
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(*_: object) -> None:
    """llama.cpp writes pages to stderr."""


def _at(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


def write_gguf(model: Path, path: Path) -> None:
    """A Llama's bfloat16 checkpoint in one safetensors file as GGUF, without its tokenizer."""
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, weight in _bfloat16_weights(model / "model.safetensors"):
        key = name.removesuffix(".weight")
        if key.startswith("model.layers."):
            number, _, key = key.removeprefix("model.layers.").partition(".")
            to = f"blk.{number}.{NAMES[key]}.weight"
        else:
            to = f"{NAMES[key]}.weight"
        if key.endswith(("q_proj", "k_proj")):  # llama.cpp rotates neighbours, transformers halves
            own = heads if key.endswith("q_proj") else kv_heads
            weight = weight.reshape(own, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        if weight.ndim == 1:
            writer.add_tensor(to, (weight.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(weight).view(np.uint8)
            writer.add_tensor(to, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _bfloat16_weights(file: Path) -> Iterator[tuple[str, Any]]:
    """Names and bits of the weights, uint16: numpy has no bfloat16."""
    content = np.memmap(file, np.uint8, "r")
    size = int(content[:8].view(np.uint64)[0])
    header = json.loads(bytes(content[8 : 8 + size]))
    header.pop("__metadata__", None)
    for name, each in header.items():
        if each["dtype"] != "BF16":
            raise RuntimeError(f"{name} is {each['dtype']}; only a bfloat16 checkpoint is converted")
        begin, end = each["data_offsets"]
        yield name, content[8 + size + begin : 8 + size + end].view(np.uint16).reshape(each["shape"])


def quantize(path: Path, to: Path, kind: str) -> None:
    """The file by llama.cpp's own quantisation."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = KINDS[kind]
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    if code := llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama_model_quantize: {code}")
