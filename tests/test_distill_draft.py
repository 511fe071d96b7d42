"""The draft that is cut from a model and trained on what that model makes of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.distill_draft import (
    WATCHED,
    Course,
    Lesson,
    distill,
    losses,
    make_lesson,
    measure,
    run,
    train,
    watch_attention,
)
from prefillcli.models.open import open_models
from prefillcli.options.commands import BenchSettings
from prefillcli.reading.compress.settings import Compression
from recipes.real_model import Review
from recipes.train_first import cut_model

TARGET = Path(__file__).parent.parent / "samples" / "models" / "target"
RULES = Compression()
REVIEWS = [
    Review(f"{start} {number} weeks of it {end}", sentiment)
    for sentiment, end in (("positive", "the pain was gone"), ("negative", "the rash came back"))
    for number in range(12)
    for start in ("after", "in the first")
]


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    watch_attention()
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        TARGET, dtype=torch.float32, attn_implementation=WATCHED
    )
    return found.eval()


@pytest.fixture(scope="module")
def lessons(teacher: PreTrainedModel) -> list[Lesson]:
    tokenizer, rng = AutoTokenizer.from_pretrained(TARGET), Random(0)
    return [make_lesson(teacher, tokenizer, REVIEWS, rng) for _ in range(2)]


def test_the_cut_model_is_the_beginning_of_the_whole(teacher: PreTrainedModel) -> None:
    tokens = torch.arange(5, 45)[None]
    small = cut_model(teacher, 2, WATCHED)
    with torch.no_grad():
        whole = teacher(tokens, output_hidden_states=True).hidden_states
        part = small(tokens, output_hidden_states=True).hidden_states
        logits = teacher.lm_head(teacher.base_model.norm(whole[2]))
        torch.testing.assert_close(part[1], whole[1])
        torch.testing.assert_close(small(tokens).logits, logits)
    assert small.config.num_hidden_layers == 2
    assert teacher.config.num_hidden_layers == 4


@pytest.mark.parametrize("layers", [0, 5])
def test_a_model_has_only_the_layers_that_it_has(teacher: PreTrainedModel, layers: int) -> None:
    with pytest.raises(ValueError, match="4 layers"):
        cut_model(teacher, layers, WATCHED)


def test_votes_are_those_of_the_models_eager_attention(teacher: PreTrainedModel) -> None:
    tokens = torch.randint(5, 200, (300,), generator=torch.Generator().manual_seed(0))
    queries = torch.tensor([150, 299])
    with torch.no_grad():
        votes, logprobs = run(teacher, tokens, queries, queries)
        eager = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager")
        wanted = eager(tokens[None], output_attentions=True)
    torch.testing.assert_close(logprobs, wanted.logits[0, queries].log_softmax(-1), atol=1e-4, rtol=0)
    shares = torch.cat(wanted.attentions)[:, :, queries].flatten(0, 1)  # [layers and heads, queries, tokens]
    pooled = F.avg_pool1d(shares, RULES.pool, stride=1, padding=RULES.pool // 2).amax(dim=0)
    for query, own, found in zip(queries.tolist(), pooled, votes, strict=True):
        size = RULES.select_chunk
        chunks = torch.stack([part.sum() for part in own.split(size)])
        last = (query + 1 - RULES.keep_last) // size  # chunks of the always-kept ends do not count
        chunks[0], chunks[last:] = 0, 0
        torch.testing.assert_close(found, chunks / chunks.sum(), atol=1e-5, rtol=1e-4)


def test_the_whole_model_has_nothing_to_learn(teacher: PreTrainedModel, lessons: list[Lesson]) -> None:
    words, looks = measure(cut_model(teacher, 4, WATCHED), lessons)
    assert abs(words) < 1e-3  # the lesson's log-probabilities are rounded to bfloat16
    assert abs(looks) < 1e-5


def test_training_lowers_the_losses_and_changes_the_last_layers_alone(
    teacher: PreTrainedModel, lessons: list[Lesson]
) -> None:
    small = cut_model(teacher, 2, WATCHED)
    before, untouched = sum(measure(small, lessons)), cut_model(teacher, 2, WATCHED).state_dict()
    train(small, lessons, layers=1, steps=12, rate=1e-3)
    assert sum(measure(small, lessons)) < 0.95 * before
    changed = {name for name, value in small.state_dict().items() if not torch.equal(value, untouched[name])}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in changed)


def test_a_lesson_asks_at_the_questions_and_behind_them(teacher: PreTrainedModel, lessons: list[Lesson]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for lesson in lessons:
        queries = lesson.queries.tolist()
        assert queries == sorted(set(queries))
        assert set(queries) <= set(lesson.predicts.tolist())
        asked = tokenizer.decode(lesson.tokens[lesson.queries])
        assert asked.count("Sentiment:") >= 4
        with torch.no_grad():
            assert all(float(loss) > 0 for loss in losses(cut_model(teacher, 1, WATCHED), lesson))


def test_the_draft_on_disk_fits_the_model_and_is_the_same_again(tmp_path: Path) -> None:
    course = Course(layers=2, train=1, prompts=1, steps=1)
    for name in ("first", "second"):
        distill(TARGET, tmp_path / name, REVIEWS, course)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "first" / "config.json").read_text())["num_hidden_layers"] == 2
    opened = open_models(BenchSettings(model=str(TARGET), draft=str(tmp_path / "first")))  # compares the tokenizers
    assert opened.draft is not None
