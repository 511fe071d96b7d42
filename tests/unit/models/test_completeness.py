"""A model is refused if its files have a tensor that nothing takes, or lack one that it has, however it is loaded."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefillcli.errors import UsageError
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model, load_weights
from prefillcli.models.shape import UNWALKED
from prefillcli.models.streamed_layers import _load_around_layers, load_streamed
from prefillcli.walk.forest import UnsupportedModelError
from tests.gguf_files import write_gguf
from tests.jobs.models import save_model
from tests.quantised_checkpoints import make_quantised
from tests.unit.walk.tiny_models import NOT_DECODERS, class_names, make_tiny_model
from tests.unit.walk.tiny_multimodal import TEXT_FILE, WHOLE, make_whole_model, save_whole

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "plain", layers=3)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A model that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def resident(folder: Path, **options: Any) -> torch.nn.Module:
    return load_model(read_model_files(folder, **options), CPU)


def streamed(folder: Path, **options: Any) -> torch.nn.Module:
    model, source = load_streamed(read_model_files(folder, **options), CPU, memory=1 << 30)
    source.close()
    return model


def as_engine_hf(folder: Path, **options: Any) -> torch.nn.Module:
    return load_weights(read_model_files(folder, **options), CPU, attention="sdpa")


WAYS = [resident, streamed, as_engine_hf]


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("text_config", config)
    inner |= changes
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def classifier(folder: Path) -> Path:
    return save_model(folder, layers=3, classifies=True)


def multimodal(folder: Path) -> Path:
    save_whole(folder, make_whole_model("gemma3", tie_word_embeddings=False))
    return folder


def quantised(kind: str, folder: Path) -> Path:
    return make_quantised(kind, save_model(folder.with_name("dense"), layers=3), folder)


KINDS = [classifier, multimodal, *(partial(quantised, kind) for kind in ("int8", "gptq", "fp8", "w8a8"))]


@pytest.mark.parametrize("load", WAYS)
def test_a_layer_that_the_configuration_leaves_out_is_not_left_out(folder: Path, load: Callable[..., Any]) -> None:
    load(folder)
    configure(folder, num_hidden_layers=2)
    with pytest.raises(UsageError, match=r"9 tensors of the weights have no place in a LlamaForCausalLM .*layers\.2"):
        load(folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", KINDS)
def test_nor_is_it_in_other_kinds_of_checkpoints(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "model")
    layers = read_model_files(folder).config.num_hidden_layers
    resident(folder)
    configure(folder, num_hidden_layers=layers - 1, layer_types=None)
    with pytest.raises(UsageError, match=rf"have no place in a .*layers\.{layers - 1}\."):
        resident(folder)


def test_nor_is_it_in_a_gguf_file(saved: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", saved, settings={"block_count": 2})
    with pytest.raises(UsageError, match=r"llama.block_count is 2; its tensors are of 3 layers"):
        read_model_files(file)


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("theta", [0.0, 1e308])
def test_rotary_frequencies_that_are_not_finite_are_refused(
    folder: Path, theta: float, load: Callable[..., Any]
) -> None:
    configure(folder, rope_parameters={"rope_type": "linear", "rope_theta": theta, "factor": 1e-300})
    with pytest.raises(UsageError, match=r"inv_freq is not finite"):
        load(folder)


def test_a_model_whose_own_forward_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    make_tiny_model("gpt2").save_pretrained(folder)
    resident(folder)
    monkeypatch.setattr("transformers.GPT2Model.forward", lambda *given, **options: 1 // 0)
    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError"):
        resident(folder)


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_parameter_that_no_tensor_fills_is_no_random_one(folder: Path, name: str, load: Callable[..., Any]) -> None:
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(UsageError, match="the weights lack"):
        load(folder)


@pytest.mark.parametrize("load", WAYS)
@pytest.mark.parametrize(
    "name", ["model.extra.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.lora_A.weight"]
)
def test_a_tensor_that_nothing_takes_is_not_passed_over(folder: Path, name: str, load: Callable[..., Any]) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(UsageError, match=f"1 tensors of the weights have no place.*{name}"):
        load(folder)


#: Rotary encodings, masks, other heads, and layers for later tokens.
LEFT_OVER = [
    *("model.layers.0.self_attn.rotary_emb.inv_freq", "model.inv_freq"),
    *("model.layers.0.attn.bias", "h.0.attn.attention.masked_bias", "score.weight", "v_head.summary.weight"),
    *("mtp.fc.weight", "model.mtp.norm.weight", "model.layers.3.eh_proj.weight", "model.layers.3.mlp.up_proj.weight"),
]


@pytest.mark.parametrize("load", WAYS)
def test_what_no_model_needs_may_be_left_over(folder: Path, load: Callable[..., Any]) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(64) for name in LEFT_OVER}))
    load(folder)


def test_a_bias_of_zeros_may_be_left_over(folder: Path) -> None:
    bias = torch.zeros(64)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": bias}))
    resident(folder)
    bias[7] = 1e-3
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": bias}))
    with pytest.raises(UsageError, match="have no place"):
        resident(folder)


def test_the_head_that_is_not_read_may_be_left_over(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "model")
    head = load_file(save_model(tmp_path / "causal", layers=3) / "model.safetensors")["lm_head.weight"]
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    for load in WAYS:
        load(folder)
        load(folder, head="vocabulary")


def test_layers_of_the_text_are_looked_at_and_towers_are_not(tmp_path: Path) -> None:
    folder = multimodal(tmp_path / "model")
    norm = next(name for name in load_file(folder / TEXT_FILE) if name.endswith("model.norm.weight"))
    extra = {norm.replace("norm", "layers.0.extra"): torch.ones(4)}
    rewrite(folder, lambda tensors: tensors.update(extra), TEXT_FILE)
    with pytest.raises(UsageError, match=r"have no place.*extra\.weight"):
        resident(folder)


def test_scales_of_a_cache_are_left_over_in_quantised_checkpoints_alone(folder: Path, tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(())}
    packed = quantised("gptq", tmp_path / "quantised")
    rewrite(packed, lambda tensors: tensors.update(extra))
    resident(packed)
    rewrite(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(UsageError, match="have no place"):
        resident(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model-2.safetensors")
    places = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UsageError, match=r"two of its files hold \"model.norm.weight\""):
        read_model_files(folder)


def test_whole_numbers_are_no_weights_unless_they_are_quantised(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].view(torch.int32)}))
    with pytest.raises(UsageError, match="is saved as whole numbers"):
        read_model_files(folder)


@pytest.mark.sampled(40)  # in CI; `make test-matrix` runs all
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({*class_names(), *WHOLE} - NOT_DECODERS.keys() - UNWALKED.keys()))
def test_what_transformers_saves_of_a_family_is_complete(family: str, tmp_path: Path) -> None:
    make = make_tiny_model if family in class_names() else make_whole_model
    make(family).save_pretrained(tmp_path)
    try:
        files = read_model_files(tmp_path)
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    load_weights(files, CPU)
    if files.part_of is None:
        with contextlib.suppress(UnsupportedModelError):
            _load_around_layers(files, CPU, "eager", False)
