"""Weights that go straight onto the device are those that go through host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prefillcli.models import load
from prefillcli.models.find import read_model_files
from tests.unit.walk.families import make_model


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_weights_that_go_straight_onto_the_device_are_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(family).save_pretrained(tmp_path)
    files, cpu = read_model_files(tmp_path), torch.device("cpu")
    through = load.load_weights(files, cpu)
    monkeypatch.setattr(load, "loads_onto", lambda device: True)
    straight = load.load_weights(files, cpu)
    assert load._further_arguments(files, None, cpu, False)["device_map"] == {"": cpu}
    for name, weight in through.state_dict().items():
        assert torch.equal(straight.state_dict()[name], weight)


def test_only_cuda_devices_are_loaded_onto_and_only_with_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load.loads_onto(torch.device("cuda:1"))
    assert not load.loads_onto(torch.device("cpu"))
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    assert not load.loads_onto(torch.device("cuda:1"))
