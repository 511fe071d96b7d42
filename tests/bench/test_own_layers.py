"""Methods by which the model's own layers pick tokens: what they read, and what that is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from prefillcli.bench.contenders import Contender, Equipment
from prefillcli.features.compress.contenders import SelfDrafted
from transformers import AutoModelForCausalLM

from prefillcli.bench.contest import contenders
from prefillcli.bench.material import Material, made_material
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.jobs.load import load_walk
from prefillcli.models.files import sample_model
from prefillcli.models.open import open_models
from prefillcli.options.commands import BenchSettings
from tests.prefill.test_thinning import by_hand

KEEP, LAYERS = 0.3, 2  # of the sample model's four


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Equipment, Material]]:
    settings = BenchSettings(
        model=str(sample_model()), draft="self", rows=5, tokens=300, method=("self-draft",), keep=(KEEP,)
    )
    opened = open_models(settings)
    labels = Labels(opened.tokenizer, parse_labels(settings.labels))
    with closing(load_walk(opened, settings)) as loaded:
        yield Equipment(loaded, labels), made_material(settings, opened, labels)


def method(stage: tuple[Equipment, Material], name: str) -> Contender:
    return next(each for each in contenders([name], *stage) if each.name == f"{name}@{KEEP}")


def operations(path: Path, layers: range, lengths: list[int]) -> float:
    """Two for each parameter of these layers and token, and twice two for each number of a pair of tokens."""
    model = AutoModelForCausalLM.from_pretrained(path)
    sizes = [sum(w.numel() for w in model.model.layers[n].parameters() if w.dim() == 2) for n in layers]
    pair = 4 * model.config.num_attention_heads * model.config.head_dim
    return sum(2 * size * tokens + pair * tokens * (tokens + 1) / 2 for size in sizes for tokens in lengths)


def test_one_pass_answers_from_what_its_first_layers_keep(stage: tuple[Equipment, Material]) -> None:
    _, material = stage
    found = method(stage, "self-draft")
    assert isinstance(found, SelfDrafted)
    run = found.run(material.prompts)
    model = AutoModelForCausalLM.from_pretrained(sample_model(), attn_implementation="eager", dtype=torch.float32)
    for question, logprobs in zip(run.questions, run.logprobs, strict=True):
        assert question.method == "self-draft"
        assert question.kept is not None
        logits = by_hand(model.eval(), question.prompt.tokens, question.kept, LAYERS - 1).log_softmax(-1)
        yes = question.prompt.labels.first[0]
        assert logprobs[0] == pytest.approx(float(logits[list(yes)].logsumexp(0)), abs=1e-3)


def test_its_cost_is_that_of_whole_prompts_and_then_of_what_is_kept(stage: tuple[Equipment, Material]) -> None:
    _, material = stage
    found = method(stage, "self-draft")
    run = found.run(material.prompts)
    unshared = max(material.prompts, key=lambda prompt: len(prompt.tokens))
    alone = found.run([unshared])
    kept = len(alone.questions[0].tokens)
    path = Path(sample_model())
    first = operations(path, range(LAYERS), [len(unshared.tokens)])
    # The last layer is computed for one token alone, and K,V for the others: a bound from both sides.
    least = first + operations(path, range(LAYERS, 3), [kept])
    most = first + operations(path, range(LAYERS, 4), [kept]) + 2 * 128 * 2046
    cost = found.cost(alone)
    assert cost.flops is not None
    assert least < cost.flops < most
    assert cost.target_tokens == len(unshared.tokens)
    ratio, _ = found.predictions(run) or (0.0, 0.0)
    assert ratio == pytest.approx(1 / (LAYERS / 4 + (1 - LAYERS / 4) * KEEP))
