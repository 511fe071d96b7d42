"""A quantised checkpoint is walked to the logits of transformers' own forward of it."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from prefillcli.errors import PrefillError, UsageError
from prefillcli.models.completeness import quiet_transformers
from prefillcli.models.find import ModelFiles, read_model_files
from prefillcli.models.load import load_model, load_weights
from prefillcli.models.open import Opened
from prefillcli.models.placement import WeightFiles
from prefillcli.models.streamed_layers import StreamedLayers, load_streamed
from prefillcli.models.unpacking import UNPACKED, unpack_awq, unpack_gptq, unpack_mxfp4
from prefillcli.models.weights import FORMATS, plan_quantisation, weight_bytes
from prefillcli.options.groups import LayerOptions
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.scoring.loading import plan_weights
from prefillcli.walk import fusion
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.walk import LayerWalk
from tests.quantised_checkpoints import BLOCK, MAKERS, integer_weights, make_quantised
from tests.unit.walk.families import make_model
from tests.unit.walk.test_walk import Prompt, mixed, walked

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages say of themselves

CPU = torch.device("cpu")
TOLERANCE = 1e-4
#: Layers round what goes into them, or compute in bfloat16: a last bit may decide about a step.
ROUNDING = {"nf4", "nf4-nested", "int8", "torchao-w8a8", "w8a8", "w8a8-fp8", "w8a8-fp8-dynamic"}

#: Of kinds that are not made of a Llama.
FAMILIES = {
    "mxfp4": "gpt_oss",
    "gptq-experts": "qwen3_moe",
    "awq-experts": "qwen3_moe",
    "fp8-experts": "qwen3_moe",
    "w4a16-experts": "qwen3_moe",
}

#: Of kinds whose weights no CPU unpacks.
PACKED = {"nf4", "nf4-nested", "int8", "torchao-w8", "torchao-w8a8"}

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
    experts = model.config.model_type in ("gpt_oss", "qwen3_moe")  # of which some are unpacked to bfloat16
    return nn.Module.float(model).eval() if experts else model.eval()


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


def assert_same_layers(files: ModelFiles) -> None:
    """Layers that are unpacked when they are read have the tensors, and give the logits, of those in memory."""
    prompts, limits = mixed(), Limits(300, 1 << 20, held_tokens=1 << 20)
    wanted = load_model(files, CPU)
    own = decoder_layers(wanted).layers
    model, layers = load_streamed(files, CPU, memory=0, firm=False)
    with closing(layers):
        for number, layer in enumerate(own):
            with layers.use(number) as read:
                found, tensors = read.state_dict(), layer.state_dict()
                assert found.keys() == tensors.keys()
                for name, tensor in tensors.items():
                    assert found[name].dtype == tensor.dtype
                    assert torch.equal(found[name], tensor), (number, name)
        with closing(LayerWalk(model, chunk_tokens=97, layers=layers)) as walk:
            packs = make_plan(prompts, limits).packs * 2
            logits = torch.cat([each for pack in packs for each in walk.read_logits(pack)])
    with closing(LayerWalk(wanted, chunk_tokens=97)) as walk:
        assert torch.equal(logits, torch.cat([each for pack in packs for each in walk.read_logits(pack)]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in PACKED])
def test_layers_that_are_unpacked_in_their_turn_have_the_same_bits(kind: str, dtype: str, folder_of: Folders) -> None:
    assert_same_layers(read_model_files(folder_of(kind), dtype=dtype))


def test_what_a_tensor_is_made_of_may_lie_in_several_files(folder_of: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folder_of("gptq-experts"), folder)
    (folder / "model.safetensors").unlink()
    tensors = list(load_file(folder_of("gptq-experts") / "model.safetensors").items())
    places = {}
    for number in range(3):
        own = dict(tensors[number::3])
        save_file(own, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        places |= dict.fromkeys(own, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_same_layers(read_model_files(folder))


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_weights_that_stay_packed_are_not_read_layer_by_layer(kind: str, folder_of: Folders) -> None:
    with pytest.raises(UnsupportedModelError, match=r"stay packed, and cannot be read layer by layer\ntake --weights"):
        load_streamed(read_model_files(folder_of(kind)), CPU, memory=1 << 30)


@pytest.mark.parametrize(("kind", "mode"), [("gptq", "stream"), ("w4a16", "stream"), ("nf4", "resident")])
def test_what_can_be_unpacked_in_its_turn_is_streamed_on_a_cpu(kind: str, mode: str, folder_of: Folders) -> None:
    opened = Opened(read_model_files(folder_of(kind), dtype="float32"), CPU, None, (), 2048)
    plans = {where: plan_weights(LayerOptions(weights=where), opened) for where in ("auto", "resident")}
    assert {where: plan.mode for where, plan in plans.items()} == {"auto": mode, "resident": "resident"}
    if mode == "stream":
        _, layers = plans["auto"].load(opened.files, CPU, trust_remote_code=False)
        assert isinstance(layers, StreamedLayers)
        layers.close()
        scratch = max(each.scratch_bytes for parts in layers._files for each in parts.conversions)
        assert layers.memory_bytes >= 2 * layers.slot_bytes + scratch
        assert layers.resident_bytes + layers.memory_bytes <= plans["auto"].taken


def test_a_layer_quantised_outside_of_the_layers_is_in_memory(folder_of: Folders, tmp_path: Path) -> None:
    """A packed head, which one format unpacks at the start, and another can only unpack with all layers."""
    for kind, streamed in (("gptq", True), ("w4a16", False)):
        folder = tmp_path / kind
        shutil.copytree(folder_of(kind), folder)
        tensors = load_file(folder / "model.safetensors")
        stem = "model.layers.0.self_attn.q_proj."
        head = tensors.pop("lm_head.weight")[:64]
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][: len(head)].clone()
        own = {name for name in tensors if name.startswith(stem)}
        tensors |= {f"lm_head.{name.removeprefix(stem)}": tensors[name].clone() for name in own}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(head)}
        config["quantization_config"] |= {"ignore": []}
        (folder / "config.json").write_text(json.dumps(config))
        opened = Opened(read_model_files(folder, dtype="float32"), CPU, None, (), 2048)
        plan = plan_weights(LayerOptions(weights="auto"), opened)
        assert plan.mode == ("stream" if streamed else "resident")
        model, layers = plan.load(opened.files, CPU, trust_remote_code=False)
        if layers is not None:
            layers.close()
        assert torch.equal(model.lm_head.weight, load_weights(opened.files, CPU).lm_head.weight)


def test_unpacking_starts_no_threads_beside_those_of_the_walk(folder_of: Folders) -> None:
    files, before = read_model_files(folder_of("gptq")), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            convert = WeightFiles.convert
            patch.setattr(
                WeightFiles, "convert", lambda *given: (seen.append(torch.get_num_threads()), convert(*given))[1]
            )
            _, layers = load_streamed(files, CPU, memory=0, firm=False)
            with closing(layers), layers.use(0):
                later: list[int] = []
                other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
                other.start()
                other.join()
        assert set(seen) == {1}
        assert (torch.get_num_threads(), later) == (3, [3])
    finally:
        torch.set_num_threads(before)


def test_mxfp4_is_unpacked_as_transformers_unpacks_it() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 80, 16, 16), dtype=torch.uint8, generator=generator)
    scales = torch.arange(2 * 80 * 16).remainder(256).to(torch.uint8).reshape(2, 80, 16)
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(unpack_mxfp4(blocks, scales).view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_is_unpacked_number_by_number(bits: int, ordered: bool) -> None:
    """200 outputs, more than are unpacked at a time; groups of inputs in order, or in any."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 1 << bits, (96, 208), generator=generator)
    points = torch.randint(0, (1 << bits) - 1, (3, 208), generator=generator)
    scales = torch.rand((3, 208), generator=generator).half()
    groups = torch.arange(96) // 32 if ordered else torch.randint(0, 3, (96,), generator=generator)

    def packed(each: Tensor) -> Tensor:
        count = 32 // bits
        parts = each.reshape(*each.shape[:-1], -1, count)
        joined = sum(parts[..., at] << (bits * at) for at in range(count))
        return joined.to(torch.uint32).view(torch.int32)

    found = unpack_gptq(packed(numbers.t()).t(), packed(points), scales, groups.int(), bits=bits, zero_offset=1)
    wanted = (numbers - points[groups] - 1) * scales.float()[groups]
    assert torch.equal(found, wanted.t())


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
    _, layers = load_streamed(read_model_files(folder), CPU, memory=0, firm=False)
    with (
        closing(layers),
        pytest.raises(UsageError, match="cannot load the weights: a zero point of 16 does not fit"),
        layers.use(1),
    ):
        pass


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
