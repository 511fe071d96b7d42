"""Every causal language model that transformers knows is exact, refused with a reason, or no decoder; and the manual
says which. `make test-matrix` runs all of it."""

from __future__ import annotations

import pytest

from tests.unit.walk.matrix import INDEX, PAGE, counted, listed, make_page, outcome_of
from tests.unit.walk.tiny_models import CHANGES, NOT_DECODERS, class_names, make_tiny_config
from tests.unit.walk.tiny_multimodal import WHOLE

LISTED = listed(PAGE.read_text())


def test_the_page_has_every_family_of_the_registry() -> None:
    assert LISTED.keys() == {*class_names(), *WHOLE}, "run make architectures"


def test_the_manuals_counts_are_those_of_the_rows() -> None:
    sentence = counted([LISTED[family].kind for family in class_names()])
    for page in (PAGE, INDEX):
        assert sentence in " ".join(page.read_text().split())


def test_the_page_is_as_make_architectures_writes_it() -> None:
    assert make_page(LISTED) == PAGE.read_text()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # some configurations warn, and some import modules that do
def test_what_is_changed_of_a_configuration_belongs_to_a_family() -> None:
    assert set(NOT_DECODERS) <= set(class_names())
    assert set(CHANGES) <= {make_tiny_config(family).model_type for family in set(class_names()) - set(NOT_DECODERS)}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*class_names(), *WHOLE])
def test_a_class_is_exact_or_refused_as_the_page_says(family: str) -> None:
    assert LISTED[family] == outcome_of(family), "run make architectures if this is how it should be"
