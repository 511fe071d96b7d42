"""llama.cpp as a contender: many sequences in a batch, logits of last tokens only, prefixes computed once.

Runs in the environment of `make setup-llamacpp`.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import llama_cpp
import numpy as np

from benchmarks.serving import (
    Method,
    Options,
    Scores,
    Settings,
    Tokens,
    batches,
    beginnings,
    groups,
    option_shares,
    share,
)

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


@contextmanager
def llama_cpp_questions(
    model: Path,
    dtype: str,
    prompts: Sequence[Tokens],
    labels: tuple[int, int],
    options: Sequence[Options],
    at_once: int,
    **sizes: Any,
) -> Iterator[tuple[Method, Settings]]:
    """A GGUF file as it is. Of the questions about a document, `at_once` are one batch, with all their options."""
    with closing(Context(model, prompts, **sizes)) as context:
        yield lambda: option_shares(context.logprobs(prompts, options, at_once)), {"at_once": at_once, **sizes}


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


class Part(NamedTuple):
    """Tokens of a batch that follow one another in these `sequences`, from the position `start`. The logits of the
    last ones are read, so many."""

    sequences: Sequence[int]
    start: int
    tokens: Tokens
    read: int = 1


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
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def scores(self, prompts: Sequence[Tokens], labels: tuple[int, int]) -> Scores:
        """P(first label) among the labels."""
        logits = np.empty((len(prompts), len(labels)), np.float32)
        for shared, rows in self.groups:
            llama_cpp.llama_memory_clear(self.memory, False)
            self._decode([Part([0], 0, prompts[rows[0]][:shared])])
            first = 1 if shared else 0
            lengths = [len(prompts[row]) - shared for row in rows]
            for batch in batches(lengths, self.batch_tokens, self.sequences):
                if not shared:
                    llama_cpp.llama_memory_clear(self.memory, False)
                for place in range(first, first + len(batch)) if shared else ():
                    llama_cpp.llama_memory_seq_rm(self.memory, place, -1, -1)
                    llama_cpp.llama_memory_seq_cp(self.memory, 0, place, -1, -1)
                read = [Part([first + place], shared, prompts[rows[at]][shared:]) for place, at in enumerate(batch)]
                for at, numbers in zip(batch, self._decode(read), strict=True):
                    logits[rows[at]] = [numbers[label] for label in labels]
        return share(logits)

    def logprobs(self, prompts: Sequence[Tokens], options: Sequence[Options], at_once: int) -> list[list[float]]:
        """The log-probabilities, over the whole vocabulary, of each option after its prompt.

        What the prompts of a group share is computed once, and of that again only what differs from the group before.
        """
        found: list[list[float]] = []
        held = prompts[0][:0]
        for shared, rows in self.groups:
            own = prompts[rows[0]][:shared]
            same = min(len(held), shared)
            unlike = np.flatnonzero(held[:same] != own[:same])
            same = int(unlike[0]) if len(unlike) else same
            llama_cpp.llama_memory_seq_keep(self.memory, 0)
            llama_cpp.llama_memory_seq_rm(self.memory, 0, same, -1)
            self._decode([Part([0], same, own[same:])])
            held = own
            for begin in range(0, len(rows), at_once):
                found += self._asked(
                    [(prompts[row][shared:], options[row]) for row in rows[begin : begin + at_once]], shared
                )
        return found

    def _asked(self, asked: Sequence[tuple[Tokens, Options]], shared: int) -> list[list[float]]:
        """The same of prompts whose first `shared` tokens sequence 0 holds, in one batch.

        Every longer option has a sequence, and a prompt is in those of its options: it is computed once.
        """
        parts: list[Part] = []
        places: list[list[tuple[int, ...]]] = []  # the tokens of an option before those that a part reads
        free = 1
        for tokens, options in asked:
            longer = [each for each in beginnings(options) if each]
            longer = [one for one in longer if not any(one == each[: len(one)] for each in longer if each != one)]
            own = range(free, free + max(1, len(longer)))
            free += len(own)
            parts.append(Part(own, shared, tokens))
            places.append([()])
            for sequence, before in zip(own, longer, strict=False):
                parts.append(Part([sequence], shared + len(tokens), np.array(before, np.int32), len(before)))
                places.append([before[:end] for end in range(1, len(before) + 1)])
        if free > self.sequences + 1 or sum(len(each.tokens) for each in parts) > self.batch_tokens:
            raise RuntimeError(f"the questions need {free - 1} sequences, or more tokens than a batch: fewer at once")
        llama_cpp.llama_memory_seq_keep(self.memory, 0)
        for sequence in range(1, free):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        logits = iter(self._decode(parts))
        found: list[dict[tuple[int, ...], Any]] = []
        for own_places in places:
            if own_places == [()]:
                found.append({})
            for place in own_places:
                numbers = np.ctypeslib.as_array(next(logits), (self.vocabulary,)).astype(np.float64)
                highest = numbers.max()
                found[-1][place] = numbers - highest - np.log(np.exp(numbers - highest).sum())
        return [
            [sum(float(own[tuple(each[:at])][token]) for at, token in enumerate(each)) for each in options]
            for own, (_, options) in zip(found, asked, strict=True)
        ]

    def _decode(self, parts: Sequence[Part]) -> list[Any]:
        """Compute parts at once, or one that is longer in several steps. The logits that are read, in order."""
        tokens = np.concatenate([each.tokens for each in parts]).astype(np.int32)
        if not len(tokens):
            return []
        lengths = [len(each.tokens) for each in parts]
        positions = np.concatenate([each.start + np.arange(len(each.tokens)) for each in parts]).astype(np.int32)
        numbers = [np.array(each.sequences, np.int32) for each in parts]
        pointers = np.repeat(np.array([each.ctypes.data for each in numbers], np.uint64), lengths)
        counts = np.repeat(np.array(list(map(len, numbers)), np.int32), lengths)
        ends = np.cumsum(lengths)
        last = np.concatenate([np.arange(end - each.read, end) for end, each in zip(ends, parts, strict=True)])
        wanted = np.zeros(len(tokens), np.int8)
        wanted[last] = 1
        begin = 0
        for begin in range(0, len(tokens), self.batch_tokens):
            part = slice(begin, begin + self.batch_tokens)
            batch = llama_cpp.llama_batch(
                n_tokens=len(tokens[part]),
                token=_at(tokens[part], ctypes.c_int32),
                embd=None,
                pos=_at(positions[part], ctypes.c_int32),
                n_seq_id=_at(counts[part], ctypes.c_int32),
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
