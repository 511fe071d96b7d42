"""Adapters merged into a model: PEFT's own forward, with the adapter beside the model, is the oracle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prefillcli.errors import UsageError
from prefillcli.models.adapters import AdapterFiles, AdapterVariants, ExchangedAdapters, open_adapters
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.open import Opened, UseVariant
from tests.adapters import last_logits, peft_model, save_adapter
from tests.jobs.models import save_model
from tests.unit.walk import test_walk

CPU = torch.device("cpu")
PROMPTS = [np.random.default_rng(n).integers(2, 400, 20 + 7 * n).astype(np.int32) for n in range(3)]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

#: Kinds of adapters: the model's family and settings, and the adapter's.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rslora": ({}, {"use_rslora": True, "r": 8}),
    "dora": ({}, {"use_dora": True}),
    "patterns": ({}, {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}}),
    "regular expressions": (
        {},
        {
            "target_modules": r"(?:.*\.)?layers\.\d+\..*(?:q|v|down)_proj",
            "exclude_modules": r".*layers\.0\.mlp.*",
            "rank_pattern": {r"layers\.1\..*v_proj": 2},
        },
    ),
    "some layers": ({}, {"layers_to_transform": [1]}),
    "all linear": ({}, {"target_modules": "all-linear"}),
    "bias of the adapter": ({"family": "qwen2"}, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
    "biases of the model": ({"family": "qwen2"}, {"bias": "all"}),
    "saved head": ({}, {"modules_to_save": ["lm_head"]}),
    "saved embedding": ({}, {"modules_to_save": ["embed_tokens"]}),
    "saved head, tied": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "head, tied": ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
    "embedding, tied": ({"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding": ({}, {"target_modules": ["v_proj", "embed_tokens"]}),
    "tokens": ({}, {"trainable_token_indices": [5, 6]}),
    "experts": (
        {"family": "mixtral"} | EXPERTS,
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": ["q_proj"]},
    ),
}


class Choice:
    """Adapters by name, for each row its own."""

    adapter_column = "who"

    def __init__(self, **folders: Path) -> None:
        self.adapter = {name: str(folder) for name, folder in folders.items()}


class OneChoice(Choice):
    adapter_column = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapters") / "model")


def opened(model: Path, choice: Choice, tokenizer: Any = None) -> Opened:
    files = read_model_files(model)
    return checked(Opened(files, CPU, tokenizer, (), files.max_length), choice)


def checked(opened: Opened, choice: Choice) -> Opened:
    return open_adapters(opened, choice.adapter, choice.adapter_column)


def files_of(opened: Opened) -> tuple[AdapterFiles, ...]:
    assert isinstance(opened.variants, AdapterVariants)
    return opened.variants.files


def applied(loaded: Any, opened: Opened) -> UseVariant | None:
    assert opened.variants is not None
    return opened.variants.apply(loaded)


def walked(loaded: Any) -> list[torch.Tensor]:
    """Logits of the last token of each prompt, by the layer walk."""
    return list(test_walk.walked(loaded, PROMPTS, chunk=16))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_adapter_computes_what_peft_computes(kind: str, tmp_path: Path) -> None:
    family, own = KINDS[kind]
    model = save_model(tmp_path / "model", **family)
    folder = save_adapter(model, tmp_path / "adapter", **own)
    found = opened(model, OneChoice(it=folder))
    loaded = load_model(found.files, CPU)
    before = walked(loaded)
    assert applied(loaded, found) is None
    after = walked(loaded)
    for ids, plain, merged in zip(PROMPTS, before, after, strict=True):
        wanted = last_logits(peft_model(model, folder), ids)
        assert float((wanted - plain).abs().max()) > 0.05
        torch.testing.assert_close(merged, wanted, atol=2e-5, rtol=1e-5)


def test_adapters_take_turns_and_the_model_comes_back_exactly(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tie_word_embeddings=True)
    folders = {
        "plain": save_adapter(model, tmp_path / "plain"),
        "dora": save_adapter(model, tmp_path / "dora", seed=2, use_dora=True, modules_to_save=["lm_head"]),
        "embedding": save_adapter(model, tmp_path / "embedding", seed=3, target_modules=["o_proj", "embed_tokens"]),
    }
    found = opened(model, Choice(**folders))
    loaded = load_model(found.files, CPU)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    alone = walked(loaded)
    adapters = applied(loaded, found)
    assert adapters is not None
    first: dict[str | None, list[torch.Tensor]] = {None: alone}
    for name in ["plain", "dora", None, "embedding", "plain", "embedding", "dora", None, "plain", None]:
        adapters(name)
        now = walked(loaded)
        for ids, logits, earlier in zip(PROMPTS, now, first.setdefault(name, now), strict=True):
            assert torch.equal(logits, earlier)
            if name is not None:
                wanted = last_logits(peft_model(model, folders[name]), ids)
                torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def test_checking_reads_no_weights_of_the_model(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    files = read_model_files(model)
    gone = replace(files, path=tmp_path / "config alone")
    gone.path.mkdir()
    (gone.path / "config.json").write_text((model / "config.json").read_text())
    adapter = files_of(checked(Opened(gone, CPU, None, (), 100), OneChoice(it=folder)))[0]
    wanted = [name for name in load_file(model / "model.safetensors") if "q_proj" in name or "v_proj" in name]
    sizes = load_file(model / "model.safetensors")
    wanted += [name for name in sizes if "down_proj" in name]
    assert adapter.merged_bytes == sum(sizes[name].nbytes for name in wanted)
    assert adapter.bytes == sum(each.nbytes for each in load_file(folder / "adapter_model.safetensors").values())


def change(folder: Path, **content: Any) -> None:
    """Set entries of the configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


REFUSED = {
    "peft_type": ({"peft_type": "LOHA"}, 'its peft_type is "LOHA", and only LORA is merged'),
    "task": ({"task_type": "SEQ_CLS"}, 'its task_type is "SEQ_CLS"'),
    "alora": ({"alora_invocation_tokens": [3, 4]}, "alora_invocation_tokens: it acts only after"),
    "replication": ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication: it adds layers"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, 'it begins with "pissa_niter_4"'),
    "rank": ({"r": 8}, "it does not fit the model: size mismatch"),
    "expression": ({"target_modules": "("}, "it does not fit the model"),
    "layers": ({"layers_to_transform": {"a": 1}}, "it does not fit the model"),
    "targets": ({"target_modules": ["q_proj", "v_proj"]}, "has no place in the model"),
    "more targets": ({"target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"]}, "is not in its file"),
    "other modules": ({"target_modules": ["wq"]}, "it does not fit the model: Target modules"),
    "saved": ({"modules_to_save": ["lm_head"]}, "its file lacks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_with_the_reason(case: str, model: Path, tmp_path: Path) -> None:
    content, reason = REFUSED[case]
    folder = save_adapter(model, tmp_path / "adapter")
    change(folder, **content)
    with pytest.raises(UsageError) as caught:
        opened(model, OneChoice(it=folder))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"--adapter {folder}")
    assert reason in lines[0]
    assert len(lines) <= 2


@pytest.mark.parametrize("content", [{"r": 10**10}, {"r": 1e300}, {"rank_pattern": {"q_proj": 10**6}}])
def test_ranks_that_no_tensor_has_are_refused_before_anything_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    change(folder, **content)
    monkeypatch.setattr("peft.PeftModel.__init__", None)
    with pytest.raises(UsageError, match=r"adapter_config.json: a rank of .*no tensor of adapter_model.safetensors"):
        opened(model, OneChoice(it=folder))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"hidden": 32}, "it does not fit the model: size mismatch"),
        ({"layers": 3}, r"layers\.2.* has no place in the model\nis it an adapter of this model"),
    ],
)
def test_an_adapter_of_another_model_is_refused(sizes: dict[str, int], said: str, model: Path, tmp_path: Path) -> None:
    folder = save_adapter(save_model(tmp_path / "other", **sizes), tmp_path / "adapter")
    with pytest.raises(UsageError, match=said):
        opened(model, OneChoice(it=folder))


def test_pickles_are_never_read(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"no adapter_model.safetensors \(found adapter_model.bin, which is not read"):
        opened(model, OneChoice(it=folder))


def test_folders_that_are_no_adapters_are_named(model: Path, tmp_path: Path) -> None:
    for folder, reason in (
        (model, "so this is not an adapter of PEFT\nit has a model: give it as --model"),
        (tmp_path, "no adapter_config.json"),
        (tmp_path / "missing", "no such folder"),
    ):
        with pytest.raises(UsageError, match=reason):
            opened(model, OneChoice(it=folder))


def test_numbers_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(UsageError, match=rf"{name} has numbers that are not finite"):
        opened(model, OneChoice(it=folder))


def test_quantised_models_are_refused(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    packed = shutil.copytree(model, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    own = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    files = read_model_files(packed)
    with pytest.raises(UsageError, match="quantised, and merging would round them once more"):
        checked(Opened(files, CPU, None, (), 100), OneChoice(it=folder))


def test_an_option_of_a_newer_peft_is_told(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    change(folder, use_something_new=True)
    opened(model, OneChoice(it=folder))
    assert "does not know use_something_new" in capsys.readouterr().err


def test_a_model_around_which_peft_was_is_the_one_before(model: Path, tmp_path: Path) -> None:
    found = opened(model, Choice(it=save_adapter(model, tmp_path / "adapter", modules_to_save=["lm_head"])))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    before = [(name, id(module), set(vars(module))) for name, module in loaded.named_modules()]
    ExchangedAdapters(loaded, files_of(found))
    assert [(name, id(module), set(vars(module))) for name, module in loaded.named_modules()] == before


def test_an_adapter_beside_a_model_is_not_merged_unasked(model: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(model, tmp_path / "both"))
    shutil.copytree(save_adapter(model, tmp_path / "adapter"), both, dirs_exist_ok=True)
    with pytest.raises(UsageError, match="has an adapter beside the model") as caught:
        read_model_files(both)
    assert len(str(caught.value).splitlines()) == 2


def test_an_adapter_that_is_given_as_a_model_is_told_apart(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    with pytest.raises(UsageError, match="give the model as --model, and this as --adapter, which names its model"):
        read_model_files(folder)
