"""Every causal language model that transformers knows is exact, refused with a reason, or no decoder; and the manual
says which. `make test-matrix` runs all of it."""

from __future__ import annotations

import re

import pytest

from tests.prefill.matrix import FEATURES, PAGE, counted, outcome_of, row_of
from tests.prefill.tiny_models import CHANGES, NOT_DECODERS, class_names, make_tiny_config
from tests.prefill.tiny_multimodal import WHOLE, whole_class

ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def test_the_page_has_every_class_of_the_registry() -> None:
    listed = [re.match(r"\| `(.+?)` \| (\w+) \|", line).groups() for line in ROWS]
    whole = {family: whole_class(family).__name__ for family in WHOLE}
    known = {*class_names().items(), *whole.items()}
    new = known - set(listed)
    assert not new, f"transformers has classes that the matrix has not: {sorted(new)}; run make architectures"
    gone = set(listed) - known
    assert not gone, f"transformers has these classes no more: {sorted(gone)}; run make architectures"
    assert len(listed) == len(set(listed))


def test_the_manuals_counts_are_those_of_the_rows() -> None:
    sentence = counted([line.split(" | ")[2] for line in ROWS[: len(class_names())]])
    for page in (PAGE, FEATURES):
        assert sentence in " ".join(page.read_text().split())


@pytest.mark.filterwarnings("ignore")  # some configurations warn, and some import modules that do
def test_what_is_changed_of_a_configuration_belongs_to_a_family() -> None:
    assert set(NOT_DECODERS) <= set(class_names())
    assert set(CHANGES) <= {make_tiny_config(family).model_type for family in set(class_names()) - set(NOT_DECODERS)}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*class_names(), *WHOLE])
def test_a_class_is_exact_or_refused_as_the_page_says(family: str) -> None:
    assert row_of(family, outcome_of(family)) in ROWS, "run make architectures if this is how it should be"
