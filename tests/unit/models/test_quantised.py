"""A quantised checkpoint is walked to the logits of transformers' own forward of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from prefillcli.errors import PrefillError, UsageError
from prefillcli.models.completeness import quiet_transformers
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model, load_weights
from prefillcli.models.streamed_layers import load_streamed
from prefillcli.models.weights import FORMATS, UNPACKED, plan_quantisation, unpack_awq, weight_bytes
from prefillcli.plan.pack import Limits
from prefillcli.walk import fusion
from prefillcli.walk.forest import UnsupportedModelError
from tests.quantised_checkpoints import BLOCK, MAKERS, integer_weights, make_quantised
from tests.unit.walk.families import make_model
from tests.unit.walk.test_walk import Prompt, mixed, walked

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages say of themselves

CPU = torch.device("cpu")
TOLERANCE = 1e-4
#: Layers round what goes into them, or compute in bfloat16: a last bit may decide about a step.
ROUNDING = {"nf4", "nf4-nested", "int8", "torchao-w8a8", "w8a8", "w8a8-fp8", "w8a8-fp8-dynamic"}

#: Of kinds that are not made of a Llama.
FAMILIES = {"mxfp4": "gpt_oss", "gptq-experts": "qwen3_moe", "awq-experts": "qwen3_moe"}

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder with a checkpoint of a kind, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        family = kind if kind not in MAKERS else FAMILIES.get(kind, "llama")
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family, hidden_size=64, intermediate_size=128).save_pretrained(made[family])
        if kind not in made:
            made[kind] = make_quantised(kind, made[family], tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


def own_model(folder: Path, dense: Path | None = None) -> PreTrainedModel:
    """What transformers makes of a checkpoint by itself; of integers that it leaves to another package, the model of
    the folder `dense` with the numbers that the integers stand for."""
    if dense is not None:
        model = own_model(dense)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".layers." in name and "proj" in name and weight.dim() > 1:
                    parts = weight.reshape(-1, weight.shape[-1]) if weight.dim() == 3 else weight
                    weight.copy_(integer_weights(parts).reshape(weight.shape))
        return model
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
        )
    return nn.Module.float(model).eval() if model.config.model_type == "gpt_oss" else model.eval()


def own_logits(model: PreTrainedModel, prompts: list[Prompt]) -> Tensor:
    """The logits of each prompt's last token, read alone."""
    with torch.inference_mode():
        ids = [torch.as_tensor(prompt).long()[None] for prompt in prompts]
        rows = [model(input_ids=each, use_cache=False).logits[0, -1] for each in ids]
    return torch.stack(rows).float()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", MAKERS)
def test_the_walk_gives_the_logits_of_transformers(kind: str, folder_of: Folders) -> None:
    folder, prompts = folder_of(kind), mixed()
    dense = folder_of(FAMILIES.get(kind, "llama")) if kind.startswith(("gptq", "awq")) else None
    wanted = own_logits(own_model(folder, dense), prompts)
    model = load_model(read_model_files(folder, dtype="float32"), CPU)
    for chunk_tokens in (31, 1 << 12):
        found = walked(model, prompts, chunk=chunk_tokens, limits=Limits(300, 1 << 20, held_tokens=1 << 20))
        if kind not in ROUNDING:
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
            continue
        # where no last bit decided, rows agree as those of other formats do, and else by a few steps
        differ = (found - wanted).abs()
        assert (differ.amax(1) <= TOLERANCE).sum() >= 3
        assert differ.mean() <= 0.02 * wanted.abs().mean()


@pytest.mark.parametrize("kind", sorted(ROUNDING))
def test_what_a_layer_makes_of_a_token_does_not_depend_on_the_others(kind: str, folder_of: Folders) -> None:
    model: Any = load_model(read_model_files(folder_of(kind), dtype="float32"), CPU)
    linear = model.model.layers[0].mlp.up_proj
    rows = torch.randn(1, 37, 64, generator=torch.Generator().manual_seed(0))
    rows[0, 5] *= 20
    with torch.inference_mode():
        together = linear(rows)
        for length in (1, 6, 20):
            apart = torch.cat([linear(part) for part in rows.split(length, dim=1)], dim=1)
            torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao-w8", "w8a8"])
def test_quantised_layers_are_never_fused(kind: str, folder_of: Folders) -> None:
    model: Any = load_model(read_model_files(folder_of(kind), dtype="float32"), CPU)
    layer = model.model.layers[0]
    own = {id(each): vars(each).get("forward") for each in layer.modules()}
    with fusion.fused(layer, 1 << 14):
        assert {id(each): vars(each).get("forward") for each in layer.modules()} == own


@pytest.mark.parametrize(("kind", "kept"), [("fp8", "unpacked"), ("w4a16", "unpacked"), ("nf4", "packed")])
def test_memory_is_that_of_what_is_loaded(
    kind: str, kept: str, folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_model_files(folder_of(kind), dtype="bfloat16")
    found = plan_quantisation(files.origin, files.quantised, CPU)
    assert found is not None
    assert found.kept == kept
    model = load_weights(files, CPU)
    layers = [each for each in model.modules() if isinstance(each, nn.Linear) and each is not model.lm_head]
    taken = sum(each.weight.nbytes for each in layers)
    if kept == "packed":  # stays a mapped file on a CPU
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        assert (
            taken < weight_bytes(files, torch.device("cuda")) < 1.3 * sum(each.nbytes for each in model.parameters())
        )
    else:
        assert {each.weight.dtype for each in layers} == {torch.bfloat16}
        assert taken <= weight_bytes(files, CPU) <= sum(each.nbytes for each in model.parameters())


def test_quantised_weights_are_not_streamed(folder_of: Folders) -> None:
    with pytest.raises(UnsupportedModelError, match="quantised weights cannot be read layer by layer"):
        load_streamed(read_model_files(folder_of("fp8")), CPU, memory=1 << 30)


def entry_of(folder: Path, entry: dict[str, Any], dense: Path) -> Path:
    for file in dense.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return folder


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"quant_method": "modelopt"}, "quantised as 'modelopt', which transformers does not know"),
        ({"bits": 4}, "quantised as 'nothing that config.json names'"),
        ({"quant_method": "hqq"}, "HQQ: transformers .* has no loader"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ: 3 bits in the layout 'gptq' are not read"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ: 4 bits in the layout 'gemv' are not read"),
        ({"quant_method": "eetq"}, "EETQ run on CUDA devices only, not on cpu"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"all": {"input_activations": DYNAMIC}}},
            "so a row's score would depend on its neighbours",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_before_weights_are_read(
    entry: dict[str, Any], said: str, folder_of: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of("fp8")
    make_model("llama").save_pretrained(tmp_path)
    files = read_model_files(entry_of(tmp_path, entry, tmp_path))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights are read"))
    with pytest.raises(PrefillError, match=said) as caught:
        load_weights(files, CPU)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("nf4", "bitsandbytes", "bitsandbytes"), ("w4a16", "compressed_tensors", "compressed-tensors"),
     ("torchao-w8", "torchao", "torchao"), ("fp8", "accelerate", "fp8")],
)  # fmt: skip
def test_a_missing_package_is_named(
    kind: str, package: str, extra: str, folder_of: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_model_files(folder_of(kind))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"the package {package} is not installed\npip install .*\[{extra}\]"):
        plan_quantisation(files.origin, files.quantised, CPU)


def test_awq_is_read_as_compressed_tensors_reads_it(folder_of: Folders) -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors = load_file(folder_of("awq") / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    packed, zeros, scales = (tensors[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales"))
    numbers, wide, points = AutoAWQConverter(bits=4, group_size=BLOCK)._convert_gemm_module(packed, scales, zeros)
    wanted = (numbers - points.repeat_interleave(BLOCK, 1)).float() * wide.float().repeat_interleave(BLOCK, 1)
    assert torch.equal(unpack_awq(packed, zeros, scales), wanted)


def test_zero_points_that_programs_read_in_two_ways_are_refused(folder_of: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("gptq"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.qzeros"][0, 0] = -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="cannot load the weights"):
        load_weights(read_model_files(folder), CPU)


def test_formats_said_to_be_tested_are_those_made_here(folder_of: Folders) -> None:
    made = [read_model_files(folder_of(kind)) for kind in MAKERS]
    found = [plan_quantisation(files.origin, files.quantised, CPU) for files in made]
    assert {each.format.method for each in found if each} == {each.method for each in FORMATS.values() if each.tested}


def test_every_format_of_transformers_is_known() -> None:
    assert FORMATS.keys() == AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - {"gguf", UNPACKED}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_fp8_stays_packed_where_a_cuda_device_computes_with_it(
    capability: tuple[int, int], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("prefillcli.models.weights.find_spec", lambda name: object() if kernels else None)
    found = plan_quantisation(Path("x"), {"quant_method": "fp8"}, torch.device("cuda"))
    assert found is not None
    assert found.kept == ("packed" if kernels and capability == (9, 0) else "unpacked")
    assert found.changes == ({} if found.kept == "packed" else {"dequantize": True})
