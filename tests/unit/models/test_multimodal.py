"""Text out of multimodal checkpoints: the scores of the whole model, and no byte of its eyes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.errors import UsageError
from prefillcli.models import multimodal
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model, load_weights
from prefillcli.models.streamed_layers import load_streamed
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from tests.unit.walk.test_walk import eager, walked
from tests.unit.walk.tiny_multimodal import TEXT_FILE, make_whole_model, save_whole

CPU = torch.device("cpu")
FAMILIES = ["gemma3", "llama4", "mllama", "mistral3", "llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_of_a_multimodal_checkpoint_is_scored_as_by_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_whole_model(family, tie_word_embeddings=False)
    save_whole(tmp_path, whole)
    opened, read = [], multimodal.safe_open

    def watched(path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return read(path, **options)

    monkeypatch.setattr(multimodal, "safe_open", watched)
    files = read_model_files(tmp_path)
    assert files.part_of == family
    model = load_model(files, CPU)
    assert opened == [TEXT_FILE]
    assert sum(each.numel() for each in model.parameters()) < sum(each.numel() for each in whole.parameters())
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 200, 31)
    prompts = [np.concatenate([prefix, rng.integers(3, 200, n)]).astype(np.int32) for n in (1, 9, 20)]
    torch.testing.assert_close(walked(model, prompts, chunk=16), eager(whole, prompts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_layers_are_read_one_by_one(family: str, tmp_path: Path) -> None:
    whole = make_whole_model(family, tie_word_embeddings=False)
    save_whole(tmp_path, whole)
    files = read_model_files(tmp_path)
    if family == "mllama":
        with pytest.raises(UnsupportedModelError, match="some layers of a mllama only read images"):
            load_streamed(files, CPU, memory=0, firm=False)
        return
    model, source = load_streamed(files, CPU, memory=0, firm=False)
    assert all(each.is_meta for layer in decoder_layers(model).layers for each in layer.parameters())
    assert sum(each.numel() for each in model.parameters()) < sum(each.numel() for each in whole.parameters())
    prompts = [np.random.default_rng(n).integers(3, 200, n).astype(np.int32) for n in (5, 40)]
    with closing(source):
        found = walked(model, prompts, chunk=16, layers=source)
    torch.testing.assert_close(found, eager(whole, prompts), rtol=1e-4, atol=1e-4)


def test_the_embedding_may_be_the_head(tmp_path: Path) -> None:
    whole = make_whole_model("gemma3", tie_word_embeddings=False)
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    save_whole(tmp_path, whole)
    model = load_weights(read_model_files(tmp_path), CPU)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_what_cannot_be_done_with_one_is_said_before_weights_are_read(tmp_path: Path) -> None:
    save_whole(tmp_path, make_whole_model("gemma3"))
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    with pytest.raises((UnsupportedModelError, UsageError), match="quantised gemma3"):
        load_weights(read_model_files(tmp_path), CPU)
    config.write_text('{"model_type": "paligemma"}')
    with pytest.raises(UnsupportedModelError, match="reads a prompt in both directions"):
        read_model_files(tmp_path)
