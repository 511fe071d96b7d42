"""Texts behind kept packs of every causal language model that transformers knows, where the forest attention
stands for its own."""

from __future__ import annotations

import pytest

from prefillcli.walk.forest import UnsupportedModelError
from tests.unit.walk.generated import assert_same_texts, beginnings, computed, greedy, written
from tests.unit.walk.matrix import HELD, ONE_PACK, PROMPTS, Trial
from tests.unit.walk.tiny_models import NOT_DECODERS, class_names
from tests.unit.walk.tiny_multimodal import WHOLE

WRITING = greedy(6)


@pytest.mark.sampled(40)  # in CI; `make test-matrix` runs all
@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted({*class_names(), *WHOLE} - set(NOT_DECODERS)))
def test_texts_of_a_class_are_those_of_its_forward(family: str) -> None:
    trial = Trial(family)
    try:
        trial.prepare()
    except UnsupportedModelError:
        pytest.skip("refused")
    rows = beginnings(PROMPTS)
    with trial.walking(7) as walk:
        if trial.own_cache:
            with pytest.raises(UnsupportedModelError, match="--engine hf"):
                written(walk, rows, WRITING)
            return
        found = {limits: written(walk, rows, WRITING, limits=limits) for limits in (ONE_PACK, HELD)}
    wanted = [computed(trial.model, row, WRITING) for row in rows]
    for texts in found.values():
        assert assert_same_texts(texts, wanted, WRITING) <= 2
