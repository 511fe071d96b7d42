"""Classification heads in the walk, against transformers' own classification of one prompt at a time."""

from __future__ import annotations

import json
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from prefillcli.models.find import read_model_files
from prefillcli.models.rehearsal import rehearse
from prefillcli.plan.pack import Limits
from prefillcli.walk.forest import UnsupportedModelError, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import make_config
from tests.unit.walk.matrix import HELD, make_prompts
from tests.unit.walk.test_walk import ONE_PACK, Prompt, mixed, single, three_levels, two_levels, walked
from tests.unit.walk.tiny_models import NOT_DECODERS, class_names, make_tiny_config, redraw

TOLERANCE = 1e-5
MATRIX_TOLERANCE = 1e-4
SEVERAL_PACKS = Limits(tokens=150, max_tokens=10**6, held_tokens=400)
FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "phi3", "qwen3_moe")


@cache
def classifier(family: str, classes: int = 3, **changes: Any) -> nn.Module:
    """A model of `family` with a head of so many classes, and weights that spread its outputs over a few units."""
    register()
    config = make_config(family, num_labels=classes, **changes)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
    return model.requires_grad_(False)


def own_forward(model: nn.Module, prompts: list[Prompt]) -> torch.Tensor:
    """Float32 logits [prompts, classes] of transformers' own forward over each prompt."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        rows = [model(input_ids=torch.as_tensor(prompt, dtype=torch.long)[None]).logits[0] for prompt in prompts]
    return torch.stack(rows).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_are_those_of_transformers(family: str) -> None:
    model, prompts = classifier(family), three_levels()
    wanted = own_forward(model, prompts)
    assert float(wanted.std(dim=0).min()) > 0.1, "a wrong prompt would show"
    for chunk, limits in ((64, SEVERAL_PACKS), (1000, ONE_PACK)):
        torch.testing.assert_close(walked(model, prompts, chunk=chunk, limits=limits), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("classes", [1, 2, 7])
def test_any_number_of_classes_is_read(classes: int) -> None:
    model, prompts = classifier("llama", classes), mixed()
    wanted = own_forward(model, prompts)
    assert wanted.shape == (len(prompts), classes)
    torch.testing.assert_close(walked(model, prompts, chunk=48), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("padding", [None, 0, 57])
def test_the_token_for_padding_does_not_matter_before_the_end(padding: int | None) -> None:
    model = classifier("qwen3", pad_token_id=padding)
    prompts = two_levels()
    for prompt in prompts:
        prompt[3] = padding or 0
        prompt[-1] = 5
    wanted = own_forward(model, prompts)
    torch.testing.assert_close(walked(model, prompts, chunk=64), wanted, rtol=0, atol=TOLERANCE)
    assert model.config.pad_token_id == padding


def test_classes_after_a_layer_are_those_of_the_model_cut_off_behind_it() -> None:
    model, cut = classifier("llama"), 2
    shorter = AutoModelForSequenceClassification.from_config(
        make_config("llama", num_labels=3, num_hidden_layers=cut), attn_implementation="eager"
    ).eval()
    shorter.load_state_dict(
        {name: value for name, value in model.state_dict().items() if name in shorter.state_dict()}
    )
    (prompt,) = single()
    ids = torch.as_tensor(prompt, dtype=torch.long)[None]
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        hidden = model.model(ids, output_hidden_states=True).hidden_states[cut][0, -1:]
        wanted = shorter(input_ids=ids).logits
    with closing(LayerWalk(model, chunk_tokens=64)) as walk:
        found = walk.label_logits(hidden, [2, 0])
    torch.testing.assert_close(found, wanted[:, [2, 0]], rtol=0, atol=TOLERANCE)


def test_a_head_in_bfloat16_errs_as_transformers_does() -> None:
    model, prompts = classifier("llama"), two_levels()
    exact = own_forward(model, prompts)
    rounded = classifier("llama", 3, attention_bias=False)  # a copy: `to` changes a model in place
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    own = float((own_forward(rounded, prompts) - exact).abs().mean())
    found = float((walked(rounded, prompts, chunk=64) - exact).abs().mean())
    assert found < 1.5 * own + 1e-3


def test_prompts_without_their_padding_end_at_the_last_other_token() -> None:
    from prefillcli.prompts.fitting import without_padding

    rng = np.random.default_rng(0)
    model, drawn = classifier("llama"), rng.integers(3, 211, 20).astype(np.int32)
    for ends in ([0], [0, 0, 0], [9, 0]):
        padded = np.concatenate([drawn, np.array(ends, np.int32)])
        kept = without_padding(padded, 0)
        assert len(kept) == 20 + ends.index(0)
        torch.testing.assert_close(walked(model, [kept], chunk=64), own_forward(model, [padded]), rtol=0, atol=1e-5)
    assert without_padding(np.zeros(4, np.int32), 0).tolist() == [0]


#: Families with both classes whose heads are not read: nearly all read a prompt's first token, or in both directions.
REFUSED = {
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "openai-gpt", "reformer"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl"),
    *("xlnet", "xmod"),
}
BOTH = sorted((set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) & set(class_names())) - set(NOT_DECODERS))


@pytest.mark.sampled(20)  # in CI; `make test-matrix` runs all
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", BOTH)
def test_the_head_of_each_family_is_exact_or_refused(family: str) -> None:
    register()
    config = make_tiny_config(family, num_labels=3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    redraw(model)
    prompts = make_prompts()
    wanted = own_forward(model, prompts)
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError):
            rehearse(model, config)
        return
    how = rehearse(model, config)
    for limits in (ONE_PACK, HELD):
        found = walked(model, prompts, chunk=7, limits=limits, attention=how.set_attention)
        torch.testing.assert_close(found, wanted, rtol=0, atol=MATRIX_TOLERANCE)


def test_the_manual_says_how_many_families_are_exact() -> None:
    page = (Path(__file__).parents[3] / "docs" / "heads.md").read_text()
    assert f"{len(BOTH) - len(REFUSED)} families" in " ".join(page.split())


@pytest.mark.parametrize(
    ("architecture", "config", "said"),
    [
        ("LlamaForTokenClassification", {"model_type": "llama"}, "LlamaForTokenClassification has a head that is not"),
        ("Qwen2ForRewardModel", {"model_type": "qwen2"}, "Qwen2ForRewardModel has a head that is not read"),
        ("BigBirdForSequenceClassification", {"model_type": "big_bird"}, "cannot score prompts"),
        ("Gemma3ForSequenceClassification", {"model_type": "gemma3"}, "the text model has no classification head"),
        ("GraniteForSequenceClassification", {"model_type": "granite"}, "no classification head for granite"),
    ],
)
def test_heads_that_are_not_read_are_refused_with_the_reason(
    architecture: str, config: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    save_file({"score.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=said):
        read_model_files(tmp_path)
