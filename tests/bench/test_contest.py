"""The methods of `prefill bench` answer alike, and their predictions are those of the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from copy import copy

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.flops import predicted_speedup
from benchmarks.methods import compressed_walk, compressor_for, layer_walk, plain_loop
from benchmarks.models import random_draft, random_llama
from benchmarks.score_runs import SAMPLES
from benchmarks.workloads import random_prompt
from prefillcli.bench import contenders as contenders_module
from prefillcli.bench.contenders import Alone, Equipment, Hybrid, Plain
from prefillcli.bench.contest import compare, contenders
from prefillcli.bench.material import Material, made_material
from prefillcli.bench.report import UNCOMPRESSED, WorkloadResult
from prefillcli.data.prompts.encoding import spans_of
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.data.rows import Prompt
from prefillcli.features.compress.contenders import Compressed, SmallModel, compressor_in
from prefillcli.features.compress.options import PICKERS, Compression
from prefillcli.jobs.load import load_walk
from prefillcli.models.open import open_models
from prefillcli.models.shape import (
    NoCostModel,
    answer_flops,
    prefill_flops,
    ratio_speedup,
    table5,
    walk_flops,
)
from prefillcli.options.commands import BenchSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.runtime.memory import with_peak
from prefillcli.stats.evaluation import label_probabilities

TARGET, DRAFT = SAMPLES / "models" / "target", SAMPLES / "models" / "draft"
TOKENS = 300


def settings_with(**given: object) -> BenchSettings:
    words = {"model": str(TARGET), "draft": str(DRAFT), "rows": 6, "tokens": TOKENS, "keep": (0.3, 1.0)} | given
    return BenchSettings.model_validate({"lookahead": 1, "keep_last": 16, "keep_private": False} | words)


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Equipment, Material]]:
    """The sample pair, and six prompts about six readers."""
    settings = settings_with()
    opened = open_models(settings)
    labels = Labels(opened.tokenizer, parse_labels(settings.labels))
    material = made_material(settings, opened, labels)
    with closing(load_walk(opened, settings)) as loaded:
        yield Equipment(loaded, labels), material


def at_rates(equipment: Equipment, *keeps: float) -> Equipment:
    """The same models, to compare methods at these keep rates."""
    found = copy(equipment)
    found.settings = equipment.settings.model_copy(update={"keep": keeps})
    return found


@pytest.fixture(scope="module")
def result(stage: tuple[Equipment, Material]) -> WorkloadResult:
    equipment, material = stage
    methods = contenders([*UNCOMPRESSED, *PICKERS], at_rates(equipment, 0.3, 1.0), material)
    runs: list[str] = []
    found = compare(
        material, methods, equipment, rounds=2, temperature=1.0, begin=lambda step: runs.append(step.split(": ")[1])
    )
    assert [run.split(",")[0] for run in runs] == [method.name for method in methods] * 3
    return found


def test_uncompressed_methods_give_the_same_answers(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    wanted = Hybrid("hybrid", equipment).run(material.prompts).logprobs
    for method in (
        Plain("hf", equipment),
        Alone("full", equipment),
        Compressed(equipment, compressor_in(equipment, "specprefill"), 1.0),
    ):
        np.testing.assert_allclose(method.run(material.prompts).logprobs, wanted, atol=1e-4, rtol=0)


def test_every_method_runs_at_every_rate(result: WorkloadResult) -> None:
    names = [each.method for each in result.methods]
    rated = [f"{name}@{keep}" for keep in ("0.3", "1") for name in PICKERS]
    assert names == ["hf", "full", "hybrid", *rated]
    assert result.truth_rows == result.rows == 6
    assert not result.notes
    for each in result.methods:
        assert each.seconds.low <= each.seconds.median <= each.seconds.high
        assert each.rows_per_second == pytest.approx(6 / each.seconds.median)
        assert each.peak_bytes is None or each.peak_bytes > 0
        assert not each.fallbacks


def test_what_keeps_all_flips_nothing(result: WorkloadResult) -> None:
    for each in result.methods:
        if each.keep in (None, 1.0):
            assert each.kept == 1
            if each.method != "hybrid":
                assert each.answers.audit.flips == 0
                assert each.answers.audit.max_difference < 1e-4
        else:
            assert 0.2 < each.kept < 0.5  # the ends come on top; a prompt's last chunk may be short
    assert next(each for each in result.methods if each.method == "hybrid").answers.audit is None


def test_the_first_runs_of_all_rates_share_what_the_draft_found(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    methods = contenders(["specprefill"], at_rates(equipment, 0.3, 0.5), material)
    small, large = (each for each in methods if isinstance(each, Compressed))
    first, second = small.first_run(material.prompts), large.first_run(material.prompts)
    assert first.reused_seconds == 0.0 < second.reused_seconds
    assert second.draft_tokens == first.draft_tokens > 0  # its cost has them, though nothing was computed again
    alone = large.run(material.prompts)
    assert [question.positions.tolist() for question in second.questions] == [
        question.positions.tolist() for question in alone.questions
    ]
    np.testing.assert_array_equal(second.logprobs, alone.logprobs)


def test_only_the_draft_reads_in_the_drafts_name(result: WorkloadResult) -> None:
    by_name = {each.method: each for each in result.methods}
    assert by_name["specprefill@0.3"].draft_tokens == by_name["hybrid"].target_tokens
    assert by_name["specprefill@1"].draft_tokens == by_name["random@0.3"].draft_tokens == 0
    assert by_name["hf"].target_tokens == by_name["full"].target_tokens == result.prompt_tokens
    assert by_name["hybrid"].target_tokens < result.prompt_tokens  # the instruction is shared


def test_predictions_are_the_formulas(stage: tuple[Equipment, Material], result: WorkloadResult) -> None:
    equipment, material = stage
    by_name = {each.method: each for each in result.methods}
    target, draft = equipment.config, SmallModel(equipment).config
    lengths = [len(prompt.tokens) for prompt in material.prompts]
    found = by_name["specprefill@0.3"]
    assert found.predicted.ratio == pytest.approx(ratio_speedup(target, draft, round(np.mean(lengths)), 0.3))
    questions = Compressed(equipment, compressor_in(equipment, "specprefill"), 0.3).run(material.prompts).questions
    kept = [len(reading.tokens) for reading in questions]
    whole, part, small = (
        sum(table5(config, n).total for n in counts)
        for config, counts in ((target, lengths), (target, kept), (draft, lengths))
    )
    assert found.predicted.table5 == pytest.approx(whole / (part + small))
    assert found.measured_over_predicted == pytest.approx(found.speedup.median / found.predicted.flops)
    assert by_name["random@0.3"].predicted.ratio == pytest.approx(1 / 0.3)
    assert by_name["hf"].predicted.ratio is None
    assert by_name["hybrid"].predicted.flops == by_name["hybrid"].speedup.median == 1


def test_only_an_architecture_without_cost_model_lacks_predictions(
    monkeypatch: pytest.MonkeyPatch, stage: tuple[Equipment, Material]
) -> None:
    equipment, material = stage

    def fails(error: Exception) -> None:
        def walk_flops(config: object, plan: object) -> float:
            raise error

        monkeypatch.setattr(contenders_module, "walk_flops", walk_flops)

    def compared() -> WorkloadResult:
        methods = [Hybrid("hybrid", equipment)]
        return compare(material, methods, equipment, rounds=1, temperature=1.0)

    fails(NoCostModel("mamba has layers of type state_space"))
    found = compared()
    assert found.notes == ["no speedup is predicted from operations: mamba has layers of type state_space"]
    assert found.methods[0].predicted.flops is None
    for error in (TypeError("a bug"), AttributeError("a bug"), ValueError("a bug")):
        fails(error)
        with pytest.raises(type(error), match="a bug"):
            compared()


@pytest.mark.parametrize("lookahead", [1, 8])
def test_flops_of_single_prompts_are_those_of_the_formula_but_for_last_layers(lookahead: int) -> None:
    target, draft = random_llama("25M", torch.float32).config, random_draft(8_000, torch.float32).config
    tokens, kept = 4_000, 800
    (whole, part) = (make_plan([random_prompt(n, 8_000)], Limits(9_999, 9_999)) for n in (tokens, kept))

    def of(config, plan, **more):
        return walk_flops(config, plan) + answer_flops(config, plan, **more)

    found = of(target, whole) / (of(draft, whole, ahead=lookahead - 1) + of(target, part))
    # The target leaves out up to a sixth of its work, which weighs the same above and below; the draft up to a half.
    least = predicted_speedup(target, draft, tokens, kept)
    half_a_draft = prefill_flops(draft, tokens).total / 2 / prefill_flops(target, tokens).total
    assert 0.95 * least < found < 1.05 / (1 / least - half_a_draft)


def test_the_ends_of_prompts_are_counted_by_hand() -> None:
    config = random_draft(8_000, torch.float32).config
    prefix = np.arange(10, dtype=np.int32)
    plan = make_plan([np.append(prefix, np.int32(99 + n)) for n in range(2)], Limits(99, 99))
    token = 6 * 256 * 512 + 2 * 256 * 64 * 6 + 2 * 256 * 128
    pair, head = 4 * 64 * 2, 2 * 256 * 8_000
    assert answer_flops(config, plan) == 2 * (token + 11 * pair + head)
    decoded = 2 * token + 2 * 12 * pair + head
    assert answer_flops(config, plan, ahead=1) == 2 * (token + 11 * pair + head) + 2 * decoded


def test_the_draft_of_the_case_is_at_most_3_percent_of_the_target() -> None:
    target, draft = random_llama("100M", torch.float32), random_draft(32_000, torch.float32)
    assert target.config.vocab_size == draft.config.vocab_size
    assert prefill_flops(draft.config, 16_384).total <= 0.03 * prefill_flops(target.config, 16_384).total


def test_the_case_walks_what_is_kept() -> None:
    model, draft = random_llama("25M", torch.float32), random_draft(8_000, torch.float32)
    prompts = [random_prompt(400, 8_000)]
    compressor = compressor_for(draft, Compression(lookahead=1, compress_above=0, keep_last=8, keep_private=False))
    with closing(compressor):
        logits, kept = compressed_walk(model, compressor, prompts, 1.0)
        torch.testing.assert_close(logits, plain_loop(model, prompts), atol=1e-4, rtol=0)
        assert kept == [400]
        logits, kept = compressed_walk(model, compressor, prompts, 0.2)
    assert 0.2 * 400 <= kept[0] < 0.35 * 400
    assert not torch.allclose(logits, layer_walk(model, prompts), atol=1e-3)


def test_the_positive_label_of_two_is_the_score() -> None:
    shares = label_probabilities(np.log([[0.2, 0.1], [1e-9, 3e-9]]), 1.0)
    np.testing.assert_allclose(shares, [[2 / 3, 1 / 3], [0.25, 0.75]])
    np.testing.assert_allclose(label_probabilities(np.log([[0.9, 0.1]]), 1e6), 0.5, atol=1e-5)


def test_texts_give_the_tokens_they_were_made_of() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = "New post: Ünïcode, 3 min.\nWould Anna read this? Answer:"
    ids = np.array(tokenizer(text)["input_ids"], np.int32)
    found = spans_of(tokenizer, [Prompt(7, ids, LabelSet(()))])
    assert found is not None
    spans = found[7]
    assert spans.text.endswith(text)
    assert spans.offsets.shape == (len(ids), 2)
    assert "".join(spans.text[a:b] for a, b in spans.offsets[-2:].tolist()).strip().endswith(":")
    assert spans_of(object(), [Prompt(0, ids, LabelSet(()))]) is None


def test_ids_that_no_text_leads_to_have_no_spans() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    pieces = tokenizer.convert_tokens_to_ids(list("Answer"))
    assert None not in pieces
    assert spans_of(tokenizer, [Prompt(0, np.array(pieces, np.int32), LabelSet(()))]) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("before", [0, 300 << 20])
def test_memory_that_was_freed_before_counts_again(before: int) -> None:
    torch.ones(before, dtype=torch.uint8)
    size = 120 << 20
    kept, peak = with_peak(lambda: sum(int(torch.ones(1 << 20, dtype=torch.uint8)[0]) for _ in range(3)))
    assert kept == 3
    _, peak = with_peak(lambda: [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(size >> 20)])
    if peak is not None:
        assert 0.9 * size <= peak <= 1.2 * size
