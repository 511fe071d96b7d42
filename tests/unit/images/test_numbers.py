"""The numbers of images' features."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from prefillcli.images.image import FIRST_FEATURE, LAST_FEATURE, RowImage
from prefillcli.images.numbers import FeatureNumbers


def image(name: int) -> RowImage:
    return RowImage(b"%d" % name, b"%d" % name, 1, 1)


def test_an_image_has_its_numbers_again_and_others_have_their_own() -> None:
    numbers = FeatureNumbers()
    first, second = numbers.placed(image(1), 10), numbers.placed(image(2), 5)
    assert (first.first, second.first) == (FIRST_FEATURE, FIRST_FEATURE + 10)
    assert numbers.placed(image(1), 10) == first
    several = numbers.placed(image(1), 40, several=True)
    assert (several.first, several.features, several.several) == (FIRST_FEATURE + 15, 40, True)
    assert numbers.placed(image(1), 10) == first
    assert first.image.data == b"1"


def test_the_images_that_were_placed_last_are_remembered() -> None:
    numbers = FeatureNumbers(2)
    one = numbers.placed(image(1), 1)
    numbers.placed(image(2), 1)
    assert numbers.placed(image(1), 1) == one  # and so it is later than the second one
    numbers.placed(image(3), 1)
    assert numbers.placed(image(1), 1) == one
    assert numbers.placed(image(2), 1).first == FIRST_FEATURE + 3


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), max_size=200), st.integers(1, 20))
def test_images_near_one_another_never_share_a_number(asked: list[tuple[int, int]], most: int) -> None:
    numbers = FeatureNumbers(most, first=100, last=163)
    owners: dict[int, tuple[int, int]] = {}  # of each number, since the last time
    seen: list[tuple[tuple[int, int], range]] = []
    for name, features in asked:
        placed = numbers.placed(image(name), features)
        own = range(placed.first, placed.first + features)
        assert own[0] >= 100
        assert own[-1] <= 163
        owners |= dict.fromkeys(own, (name, features))
        seen.append(((name, features), own))
        # 32 numbers, half of all, are those of at least four of these images
        for key, numbers_of in seen[-4:]:
            assert all(owners[number] == key for number in numbers_of)


def test_an_image_of_every_row_has_new_numbers_before_its_own_come_again() -> None:
    numbers = FeatureNumbers(first=100, last=163)
    for name in range(1, 100):
        logo, other = numbers.placed(image(0), 4), numbers.placed(image(name), 7)
        assert not {*range(logo.first, logo.first + 4)} & {*range(other.first, other.first + 7)}


def test_numbers_stay_in_32_bits() -> None:
    numbers = FeatureNumbers()
    numbers.placed(image(0), LAST_FEATURE - FIRST_FEATURE - 3)
    assert numbers.placed(image(1), 4).first == LAST_FEATURE - 3
    assert numbers.placed(image(2), 4).first == FIRST_FEATURE


def test_threads_agree_about_every_image() -> None:
    numbers = FeatureNumbers()
    with ThreadPoolExecutor(8) as pool:
        placed = list(pool.map(lambda name: numbers.placed(image(name % 50), 3), range(5000)))
    assert len({each.first for each in placed}) == 50
    assert all(placed[at].first == placed[at % 50].first for at in range(5000))
