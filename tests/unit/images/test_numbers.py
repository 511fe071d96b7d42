"""The numbers of images' features."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.images.image import FIRST_FEATURE, LAST_FEATURE, PlacedImage, RowImage
from prefillcli.images.numbers import FeatureNumbers


def image(name: int) -> RowImage:
    return RowImage(b"%d" % name, b"%d" % name, 1, 1)


def numbers_of(placed: PlacedImage) -> range:
    return range(placed.first, placed.first + placed.features)


def disjoint(images: list[PlacedImage]) -> bool:
    runs = sorted((own.start, own.stop) for own in map(numbers_of, images))
    return all(before[1] <= after[0] for before, after in pairwise(runs))


def test_an_image_has_its_numbers_again_and_others_have_their_own() -> None:
    numbers = FeatureNumbers()
    first, second = numbers.placed(image(1), 10), numbers.placed(image(2), 5)
    several = numbers.placed(image(1), 40, several=True)
    assert disjoint([first, second, several])
    assert (several.features, several.several, first.features) == (40, True, 10)
    assert numbers.placed(image(1), 10) == first
    assert first.image.data == b"1"


def test_whatever_the_order_of_images_they_have_the_same_numbers() -> None:
    names = np.random.default_rng(3).permutation(3000).tolist()
    some, others = (
        {name: numbers.placed(image(name), 64) for name in order}
        for numbers, order in ((FeatureNumbers(), names), (FeatureNumbers(), sorted(names)))
    )
    assert sum(some[name] != others[name] for name in names) <= 3  # that wanted the same numbers
    assert disjoint(list(some.values()))
    assert disjoint(list(others.values()))


def test_the_images_that_were_placed_last_are_remembered() -> None:
    numbers = FeatureNumbers(2, first=0, last=1)
    one, two = (numbers.placed(image(name), 1) for name in (1, 2))
    assert numbers.placed(image(1), 1) == one  # and so it is later than the second one
    assert numbers.placed(image(3), 1).first == two.first
    assert numbers.placed(image(1), 1) == one


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=200), st.integers(4, 20))
def test_images_near_one_another_never_share_a_number(asked: list[tuple[int, int]], most: int) -> None:
    numbers = FeatureNumbers(most, first=100, last=163)
    seen: list[PlacedImage] = []
    for name, features in asked:
        seen.append(numbers.placed(image(name), features))
        assert all(100 <= number <= 163 for number in numbers_of(seen[-1]))
        last = {(each.image.key, each.features): each for each in seen[-4:]}  # of 28 numbers at most
        assert disjoint(list(last.values()))


def test_numbers_stay_in_32_bits() -> None:
    numbers = FeatureNumbers()
    whole = numbers.placed(image(0), LAST_FEATURE + 1 - FIRST_FEATURE)
    assert numbers_of(whole) == range(FIRST_FEATURE, LAST_FEATURE + 1)
    assert FIRST_FEATURE <= numbers.placed(image(1), 4).first <= LAST_FEATURE - 3


def test_threads_agree_about_every_image() -> None:
    numbers = FeatureNumbers()
    with ThreadPoolExecutor(8) as pool:
        placed = list(pool.map(lambda name: numbers.placed(image(name % 50), 3), range(5000)))
    assert len({each.first for each in placed}) == 50
    assert all(placed[at].first == placed[at % 50].first for at in range(5000))


def test_numbers_tell_whether_any_image_was_placed() -> None:
    numbers = FeatureNumbers()
    assert not numbers.given
    numbers.placed(image(1), 1)
    assert numbers.given
