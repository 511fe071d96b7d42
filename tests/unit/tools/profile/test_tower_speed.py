"""The speed of a vision tower, which predictions of jobs with images use."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import SiglipVisionConfig

from prefillcli.options.commands import ProfileSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.profile import measuring
from tests.jobs.models import save_model
from tests.unit.models.image_families import load_whole, make_family, open_processor


def settings(model: Path) -> ProfileSettings:
    given = {"model": str(model), "device": "cpu", "threads": torch.get_num_threads(), "quiet": True}
    return load_settings(ProfileSettings, given, environment={})


def test_the_tower_is_timed_on_a_blank_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_family("gemma3", tmp_path / "gemma3")
    calls = count()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: float(next(calls))))  # a second a run
    speed = measuring.time_tower(settings(model))
    given = open_processor(model).image_processor(Image.new("RGB", (448, 448)), return_tensors="pt")
    whole = load_whole(model)
    assert isinstance(whole.config.vision_config, SiglipVisionConfig)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        whole.model.vision_tower(given["pixel_values"])
    assert speed == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_model_of_text_has_none(tmp_path: Path) -> None:
    assert measuring.time_tower(settings(save_model(tmp_path / "plain"))) is None
