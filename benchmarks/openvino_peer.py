"""OpenVINO as a contender: the model of GenAI's continuous batching, with prefixes computed once.

Rows are packed without padding, attention is paged, and the head reads last tokens only. GenAI does the same in C++
but gives no probability of a label, so that batches are made here. Runs in the environment of `make setup-openvino`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

from benchmarks.serving import Method, Scores, Settings, Tokens, batches, groups, share

#: An input that is added: the tokens whose logits are wanted.
WANTED = "wanted"


@contextmanager
def openvino_peer(
    model: Path, dtype: str, prompts: Sequence[Tokens], labels: tuple[int, int], weights: str, **options: Any
) -> Iterator[tuple[Method, Settings]]:
    """`weights` as in `exported`; `options` are those of `Paged`."""
    paged = Paged(exported(model, weights), prompts, **options)
    yield lambda: paged.scores(prompts, labels), {"weights": weights, **options}


def exported(model: Path, weights: str) -> Path:
    """The model as optimum exports it for GenAI, in a folder beside it; made if it is not there yet.

    `weights`: none, or the mode of nncf's compression.
    """
    folder = model.with_name(f"{model.name}-openvino")
    whole, wanted = folder / "none" / "openvino_model.xml", folder / weights / "openvino_model.xml"
    if not whole.exists():
        from optimum.intel import OVModelForCausalLM

        network = OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False)
        network.save_pretrained(whole.parent)
    if not wanted.exists():
        import nncf

        network = openvino.Core().read_model(whole)
        network = nncf.compress_weights(network, mode=nncf.CompressWeightsMode[weights])
        openvino.save_model(network, wanted, compress_to_fp16=False)
    return wanted


class Paged:
    """A compiled model and its cache of K,V in blocks.

    `batch_tokens` are computed at once. `group` is the group size of dynamic quantisation: activations become int8
    before products with int8 weights; 0: they do not. `cache` is the precision of K,V, `precision` of the rest.
    """

    def __init__(
        self,
        path: Path,
        prompts: Sequence[Tokens],
        *,
        batch_tokens: int,
        group: int,
        cache: str,
        precision: str,
        threads: int,
    ) -> None:
        self.batch_tokens, self.groups = batch_tokens, groups(prompts)
        network = openvino.Core().read_model(path)
        paged_attention_transformation(network)
        _read_wanted_only(network)
        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": threads,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
            "KV_CACHE_PRECISION": cache,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = openvino.Core().compile_model(network, "CPU", settings)
        self.request = compiled.create_infer_request()
        caches = [each for each in compiled.inputs if "_cache." in each.get_any_name()]
        # Tokens of a block; quantised keys have their scales among them
        self.block = min(int(each.get_partial_shape()[2].get_length()) for each in caches)
        rows = max(len(rows) for _, rows in self.groups)
        blocks = -(-(2 * max(map(len, prompts)) + batch_tokens) // self.block) + rows
        for each in caches:
            shape = [blocks, *(size.get_length() for size in list(each.get_partial_shape())[1:])]
            self.request.set_tensor(each, openvino.Tensor(each.get_element_type(), openvino.Shape(shape)))

    def scores(self, prompts: Sequence[Tokens], labels: tuple[int, int]) -> Scores:
        """P(first label) among the labels."""
        logits = np.empty((len(prompts), len(labels)), np.float32)
        for shared, rows in self.groups:
            held = shared // self.block  # whole blocks can be shared
            self._read([(0, prompts[rows[0]][: held * self.block])], 0)
            texts = [prompts[row][held * self.block :] for row in rows]
            for batch in batches([len(each) for each in texts], self.batch_tokens):
                read = self._read([(held, texts[at]) for at in batch], held)
                logits[[rows[at] for at in batch]] = read[:, 0, list(labels)]
        return share(logits)

    def _read(self, parts: Sequence[tuple[int, Tokens]], free: int) -> Any:
        """Compute (blocks held of the prefix, tokens) at once, or one that is longer in several steps.

        Logits [parts, 1, vocabulary] of each one's last token. Blocks from `free` on are taken.
        """
        tables = []
        for held, tokens in parts:
            own = -(-len(tokens) // self.block)
            tables.append([*range(held), *range(free, free + own)])
            free += own
        longest = max(len(tokens) for _, tokens in parts)
        found = None
        step = self.batch_tokens if len(parts) == 1 else longest
        for begin in range(0, longest, step):
            past = [held * self.block + begin for held, _ in parts]
            texts = [tokens[begin : begin + step] for _, tokens in parts]
            counts = [len(each) for each in texts]
            ends = list(accumulate(counts))
            positions = [at + np.arange(count) for at, count in zip(past, counts, strict=True)]
            inputs = {
                "input_ids": np.concatenate(texts).astype(np.int64),
                "position_ids": np.concatenate(positions).astype(np.int64),
                "past_lens": np.array(past, np.int32),
                "subsequence_begins": np.array([0, *ends], np.int32),
                "block_indices": np.concatenate(tables).astype(np.int32),
                "block_indices_begins": np.array([0, *accumulate(map(len, tables))], np.int32),
                "max_context_len": np.array(max(map(int.__add__, past, counts)), np.int32),
                WANTED: np.array(ends, np.int64) - 1,
            }
            found = self.request.infer(inputs, share_inputs=True)[0]
        return found


def _read_wanted_only(network: Any) -> None:
    """Have the head read the tokens of a new input, as GenAI does."""
    head = network.get_results()[0].input_value(0).get_node()
    wanted = opset13.parameter([-1], openvino.Type.i64, name=WANTED)
    wanted.output(0).set_names({WANTED})
    taken = opset13.gather(head.input_value(0), wanted, opset13.constant(np.int64(0)))
    head.input(0).replace_source_output(taken.output(0))
    network.add_parameters([wanted])
    network.validate_nodes_and_infer_types()
