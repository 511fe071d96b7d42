"""The weights of a GGUF file as the walk reads them, layer by layer, against transformers' own reading of the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from prefillcli.errors import UsageError
from prefillcli.models.gguf import GgufModel
from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.models.placement import place_gguf, read_all
from prefillcli.rows.proof import ModelContents
from tests.unit.walk.tiny_models import EXPERTS, make_tiny_model

#: The families that transformers reads from GGUF in ways of their own, and some that it reads as they are.
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "bloom": "bloom",
    "gpt2": "gpt2",
    "mamba": "mamba",
    "nemotron": "nemotron",
    "lfm2": "lfm2",
    "minimax-m2": "minimax_m2",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "stablelm": "stablelm",
}


def written(path: Path, architecture: str, model: PreTrainedModel) -> GgufModel:
    """A file with random numbers for a model, in the shapes that llama.cpp's converter gives its tensors."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.name", "tiny")
    heads = getattr(model.config, "num_key_value_heads", None) or 4
    writer.add_uint32(f"{architecture}.attention.head_count", 4)
    if architecture == "lfm2":  # which has one number for each layer
        writer.add_array(f"{architecture}.attention.head_count_kv", [heads] * model.config.num_hidden_layers)
    else:
        writer.add_uint32(f"{architecture}.attention.head_count_kv", heads)
    writer.add_uint32(f"{architecture}.feed_forward_length", 96)
    writer.add_uint32(f"{architecture}.embedding_length", model.config.hidden_size)
    for name, shape in shapes(architecture, model):
        array = random.normal(0, 1, shape).astype(np.float32)
        if "ssm_a" in name:  # of which transformers takes the logarithm
            array = -np.abs(array) - 1
        kind = Kind.F32
        if array.ndim > 1 and shape[-1] % 32 == 0:
            kind = (Kind.Q8_0, Kind.F16, Kind.Q4_1)[len(name) % 3]
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufModel(path, (read_gguf_header(path),), ModelContents(path), "")


_TRANSPOSED = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")


def shapes(architecture: str, model: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors in a model's file."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    wanted = model.state_dict()
    for name, own in get_gguf_hf_weights_map(model, processor).items():
        shape = tuple(wanted[own].shape)
        if name == "output.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith(("ffn_gate_exps", "ffn_up_exps")):
            shape = (shape[0], shape[1] // 2, shape[2])
        if architecture == "gpt2" and name.endswith(_TRANSPOSED):
            shape = shape[::-1]
        if name.endswith("ffn_gate_inp_shexp.weight"):
            shape = shape[1:]
        if "conv" in name and len(shape) == 3:
            shape = (shape[0], shape[2])
        yield f"{name}.weight" if name.endswith("_exps") else name, shape


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_all_numbers_are_those_of_transformers(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_model(FAMILIES[architecture])
    file = written(tmp_path / "m.gguf", architecture, model)
    theirs = load_gguf_checkpoint(str(file.origin), return_tensors=True, model_to_load=model, torch_dtype=dtype)
    found, wanted = read_all(file, model, dtype), theirs["tensors"]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "minimax-m2"])
def test_experts_are_read_one_by_one(architecture: str, tmp_path: Path) -> None:
    model = make_tiny_model(FAMILIES[architecture])
    placement = place_gguf(written(tmp_path / "m.gguf", architecture, model), model)
    layer = placement.layers[1]
    assert layer.experts == EXPERTS
    experts = [tensor for name, tensor in model.state_dict().items() if ".layers.1." in name and ".experts." in name]
    for expert in range(layer.experts):
        pieces = [piece for piece in layer.pieces if piece.expert == expert]
        assert len(pieces) == 3
        assert sum(piece.count for piece in pieces) == sum(each.numel() for each in experts) / EXPERTS


def test_a_file_without_a_layers_weight_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    file = written(tmp_path / "m.gguf", "llama", model)
    (header,) = file.parts
    fewer = tuple(tensor for tensor in header.tensors if tensor.name != "blk.1.ffn_up.weight")
    with pytest.raises(UsageError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight"):
        place_gguf(replace(file, parts=(replace(header, tensors=fewer),)), model)
