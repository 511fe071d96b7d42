"""`prefill bench` with a draft that has another tokenizer: what it costs is counted over its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from prefillcli.bench.contenders import Equipment
from prefillcli.features.compress.contenders import SmallModel
from transformers import AutoConfig

from benchmarks.score_runs import SAMPLES
from prefillcli.bench.contest import contenders
from prefillcli.bench.material import Material, made_material
from prefillcli.data.prompts.labels import Labels, parse_labels
from prefillcli.jobs.load import load_walk
from prefillcli.models.open import open_models
from prefillcli.models.shape import table5
from prefillcli.options.commands import BenchSettings

KEEP, DECODED = 0.3, 3


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[Equipment, Material]]:
    target, draft = SAMPLES / "models" / "target", SAMPLES / "models" / "draft-words"
    settings = BenchSettings(
        model=str(target), draft=str(draft), draft_tokenizer="translate", rows=6, tokens=600, compress_above=100,
        lookahead=1 + DECODED, keep=(KEEP,),
    )  # fmt: skip
    opened = open_models(settings)
    labels = Labels(opened.tokenizer, parse_labels(settings.labels))
    with closing(load_walk(opened, settings)) as loaded:
        yield Equipment(loaded, labels), made_material(settings, opened, labels)


def test_the_drafts_work_is_that_over_its_own_tokens(stage: tuple[Equipment, Material]) -> None:
    equipment, material = stage
    found = next(each for each in contenders(["specprefill"], *stage) if each.keep == KEEP)
    run = found.run([material.prompts[0]])
    assert {question.method for question in run.questions} == {"specprefill"}
    small = SmallModel(equipment)
    (read,) = small.in_its_tokens(run.drafted)
    words = equipment.opened.draft_tokenizer
    assert words.decode(read) == equipment.tokenizer.decode(material.prompts[0].tokens)
    assert len(read) == run.draft_tokens < len(material.prompts[0].tokens)
    config = AutoConfig.from_pretrained(SAMPLES / "models" / "draft-words")
    work = small.flops(run.drafted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "_translator", None)  # as if the model read these tokens too
        assert work == small.flops([read]) < small.flops(run.drafted)
    whole, kept = (table5(equipment.config, len(each)).total for each in (run.drafted[0], run.questions[0].tokens))
    predicted = found.predictions(run)
    assert predicted is not None
    assert predicted[1] == pytest.approx(whole / (kept + table5(config, len(read)).total))
