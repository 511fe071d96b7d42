"""A model's ends, with its layers called in between, are the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prefillcli.stats.arrays import Int64Array
from prefillcli.walk import model_ends
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import HEAD_ROWS, ModelEnds, Recording, decoder_layers, logit_bytes
from tests.unit.walk.tiny_models import VOCABULARY, make_tiny_model

# Where their layers are.
PLACES = {
    "llama": "model.layers.",
    "gpt2": "transformer.h.",
    "gpt_bigcode": "transformer.h.",
    "bloom": "transformer.h.",
    "mpt": "transformer.blocks.",
    "gptj": "transformer.h.",
    "gpt_neo": "transformer.h.",
    "openai-gpt": "transformer.h.",
    "opt": "model.decoder.layers.",
    "modernbert-decoder": "model.layers.",
    "llama4_text": "model.layers.",
    "moshi": "model.layers.",
    "bamba": "model.layers.",
    "falcon_h1": "model.layers.",
    "xlstm": "backbone.blocks.",
    "bert": "bert.encoder.layer.",
    "gemma3n_text": "model.layers.",
    "deepseek_v4": "model.layers.",
}
TOKENS = torch.as_tensor(np.random.default_rng(5).integers(3, VOCABULARY, 30))


@contextmanager
def ends_of(family: str) -> Iterator[tuple[Any, ModelEnds]]:
    """A model and its ends; the model has its layers back when this is over."""
    model = make_tiny_model(family)
    ends = ModelEnds(model)
    try:
        with torch.inference_mode():
            yield model, ends
    finally:
        ends.close()


def through_layers(ends: ModelEnds, recording: Recording, depths: Int64Array) -> Tensor:
    """The folded residual stream after the last layer."""
    hidden = recording.hidden
    for layer, call in zip(ends.layers, recording.calls, strict=True):
        hidden = ends.call(layer, hidden, call, depths)
        assert hidden.shape == recording.hidden.shape
    return hidden


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", PLACES)
@pytest.mark.filterwarnings("ignore")  # some of these warn while they are built
def test_the_ends_with_the_layers_in_between_are_the_models_own_forward(family: str) -> None:
    with ends_of(family) as (model, ends):
        places = np.arange(len(TOKENS))
        hidden = through_layers(ends, ends.record(TOKENS, places), places)
        found, labels = torch.cat(list(ends.logits(hidden))), ends.label_logits(hidden[0], [5, 9])
        ends.close()
        wanted = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    place = decoder_layers(model)
    assert (place.prefix, list(place.layers)) == (PLACES[family], ends.layers)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(labels, wanted[:, [5, 9]], atol=1e-5, rtol=0)


def test_logits_come_in_pieces_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends_of("llama") as (_, ends):
        places = np.arange(len(TOKENS))
        hidden = through_layers(ends, ends.record(TOKENS, places), places)
        (whole,) = ends.logits(hidden)
        monkeypatch.setitem(model_ends.LOGIT_BYTES, "cpu", 4 * VOCABULARY * 8)
        pieces = list(ends.logits(hidden))
        ends.close()
    assert max(map(len, pieces)) <= 8
    torch.testing.assert_close(torch.cat(pieces), whole)


@pytest.mark.parametrize(("device", "passes"), [("cpu", 13), ("cuda", 1), ("cuda:1", 1)])
def test_a_gpu_reads_hundreds_of_prompts_in_one_pass_over_the_head(device: str, passes: int) -> None:
    reads, vocabulary = 400, 128_256
    rows = logit_bytes(torch.device(device), vocabulary) // (4 * vocabulary)
    assert -(-reads // min(rows, HEAD_ROWS)) == passes


def test_a_piece_holds_what_the_memory_law_counts() -> None:
    for device in (torch.device("cpu"), torch.device("cuda")):
        assert logit_bytes(device, 10**9) == 4 * 10**9, "one token at least"
    assert logit_bytes(torch.device("cuda"), VOCABULARY) == 4 * VOCABULARY * HEAD_ROWS


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt", "gpt_neo", "rwkv", "mamba2"])
@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_recorded_with_a_cache_read_on_behind_it(family: str) -> None:
    with ends_of(family) as (model, ends):
        ends.close()
        wanted = model(input_ids=TOKENS[None], use_cache=False).logits[0, 20:]
        before = model(input_ids=TOKENS[None, :20], use_cache=True)
        ends = ModelEnds(model)
        cache = next(before[name] for name in ("past_key_values", "cache_params", "state") if name in before)
        places = np.arange(20, 30)
        recording = ends.record(TOKENS[20:], places, cache=cache, attention_mask=torch.ones(1, 30))
        found = torch.cat(list(ends.logits(through_layers(ends, recording, places))))
        ends.close()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_positions_begin_where_the_model_begins_them() -> None:
    with ends_of("roberta") as (model, ends):  # behind the number of its padding token
        first = ends.record(TOKENS, np.arange(len(TOKENS))).hidden
        gap = ends.record(TOKENS[4:], np.arange(4, len(TOKENS))).hidden
        ends.close()
        wanted = model.roberta.embeddings(input_ids=TOKENS[None])
    assert torch.equal(first, wanted)
    assert torch.equal(gap, wanted[:, 4:])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("rwkv", "more than the residual stream"),
        ("xlm", "changes the residual stream between its layers"),
        ("hrm_text", "each of its layers once"),
        ("cpmant", "for 7 tokens"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_no_row_of_layers_is_refused_with_the_reason(family: str, reason: str) -> None:
    with ends_of(family) as (_, ends), pytest.raises(UnsupportedModelError, match=reason):
        ends.record(TOKENS, np.arange(len(TOKENS)))
