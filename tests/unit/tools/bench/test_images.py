"""`python -m benchmarks.images`, at a tiny size: both ways of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file

from benchmarks import images
from benchmarks.image_models import picture, random_model

pytestmark = pytest.mark.nightly


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"{number}.jpg" for number in range(3)]
    for number, file in enumerate(files):
        file.write_bytes(picture(number, width=64 + 32 * number, height=80))
    return files


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl"])
def test_a_checkpoint_is_compared_with_transformers(
    family: str, tmp_path: Path, photos: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = random_model(family, "tiny", 512, tmp_path / "model")
    images.main(photos[1:], model, photos[:1], rounds=1)
    said, result = capsys.readouterr().out.splitlines()[-2:]
    found = json.loads(result)
    assert said.startswith("prefill agrees with transformers")
    assert found["rows"] == 5
    assert found["largest_difference_of_logprobs"] < 1e-4


def test_another_model_does_not_agree(
    tmp_path: Path, photos: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("idefics3", "tiny", 512, tmp_path / "model")
    other = random_model("idefics3", "tiny", 512, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: 30 * each for name, each in weights.items()}, other / "model.safetensors", {"format": "pt"})
    whole = images.Whole
    monkeypatch.setattr(images, "Whole", lambda folder, *settings: whole(other, *settings))
    with pytest.raises(typer.Exit):
        images.main(photos, model, None)
    assert "DOES NOT AGREE" in capsys.readouterr().out


def test_every_case_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    images.main(None, None, None, size="tiny", dtype="float32", case=None, rows=8, rounds=1, peers=False)
    output = capsys.readouterr().out
    found = json.loads(output.splitlines()[-1])
    assert list(found["cases"]) == ["one", "ten", "repeated", "ahead"]
    assert {each["largest_difference"] < 1e-4 for each in found["cases"]["one"].values()} == {True}
    assert re.search(r"prefill, 10\W", output)
    assert found["cases"]["ahead"]["tower"]["seconds"]["median"] > 0


def test_turns_have_pictures_of_their_own_and_repeat_some() -> None:
    first, second = (images.rows_of(seed, 16, times=2) for seed in (0, 1_000))
    photos = [{row["photo"] for row in rows} for rows in (first, second)]
    assert [len(own) for own in photos] == [14, 14]
    assert not photos[0] & photos[1]
    assert len({row["prompt"] for row in first}) == 2
    assert len(first) == 32
