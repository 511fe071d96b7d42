"""Inputs of images that are made ahead of packs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from prefillcli.engines.images import Ahead
from prefillcli.images.image import PlacedImage, RowImage

ROOT = Path(__file__).parents[3]


def placed(number: int) -> PlacedImage:
    return PlacedImage(number, 1, RowImage(b"", bytes([number]), 1, 1), False)


def expected(*numbers: int) -> dict[tuple[bytes, bool], PlacedImage]:
    return {(bytes([number]), False): placed(number) for number in numbers}


class Made:
    """Makes 40 bytes of an image."""

    def __init__(self) -> None:
        self.images: list[int] = []

    def __call__(self, image: PlacedImage) -> dict[str, torch.Tensor]:
        self.images.append(image.first)
        if image.first == 9:
            raise ValueError("nine")
        return {"pixels": torch.full((10,), float(image.first))}


def wait_for(made: Made, count: int) -> None:
    end = time.monotonic() + 30
    while len(made.images) < count and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(made.images) == count


def test_inputs_are_made_in_order_while_there_is_room() -> None:
    made = Made()
    ahead = Ahead(made)
    ahead.most = 100
    ahead.expect(expected(*range(6)))
    wait_for(made, 3)
    assert made.images == [0, 1, 2]
    assert ahead.take(placed(0))["pixels"][0] == 0
    wait_for(made, 4)
    assert ahead.take(placed(5))["pixels"][0] == 5, "it is not waited for"
    ahead.expect(expected(4, 3))
    for number in (3, 4):
        assert ahead.take(placed(number))["pixels"][0] == number
    assert sorted(made.images) == list(range(6))
    ahead.close()


def test_a_failure_is_met_where_its_inputs_are_taken() -> None:
    made = Made()
    ahead = Ahead(made)
    ahead.most = 100
    ahead.expect(expected(9, 1))
    wait_for(made, 2)
    with pytest.raises(ValueError, match="nine"):
        ahead.take(placed(9))
    assert ahead.take(placed(1))["pixels"][0] == 1
    ahead.close()


@pytest.mark.nightly
def test_inputs_that_nobody_takes_keep_no_process_alive() -> None:
    code = (
        "from tests.unit.engines.test_images import Ahead, Made, expected\n"
        "ahead = Ahead(Made()); ahead.most = 1; ahead.expect(expected(1, 2, 3)); print('end')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    assert done.stdout == "end\n"
