"""`profile.json`: what it keeps, and when it applies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prefillcli.errors import UsageError
from prefillcli.forecast.profile import Profile
from prefillcli.rows.proof import sealed_text
from tests.unit.tools.profile.making import made_profile, made_survey


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    profile, path = made_profile(survey=made_survey()), tmp_path / "profile.json"
    path.write_text(profile.sealed())
    assert Profile.load(str(path)) == profile


def test_a_file_with_changed_numbers_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "profile.json", sealed_text(made_profile().model_dump_json())
    path.write_text(json.dumps(json.loads(text) | {"budget_bytes": made_profile().budget_bytes + 1}))
    with pytest.raises(UsageError, match="not as prefill profile wrote it"):
        Profile.load(str(path))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json: no such file"):
        Profile.load(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a profile"),
        ("[]", "not a profile"),
        ('{"schema_version": 2}', "not a profile"),
        ('{"schema_version": 1}', "a profile of version 1, not 2; make a new one"),
        ("\0", "not a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_told(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        Profile.load(str(tmp_path / "profile.json"))


def test_it_applies_to_the_same_model_here_and_now() -> None:
    profile = made_profile()
    assert profile.mismatch("0123abcd", torch.float32, torch.device("cpu")) is None
    assert profile.mismatch("0123abcd", "float32", "cpu") is None


def test_it_does_not_apply_elsewhere() -> None:
    profile = made_profile()
    assert "another model" in str(profile.mismatch("ffff", "float32", "cpu"))
    assert "dtype float32, not bfloat16" in str(profile.mismatch("0123abcd", torch.bfloat16, "cpu"))
    assert "device cpu, not cuda" in str(profile.mismatch("0123abcd", "float32", "cuda:0"))
    for change, said in (({"cpu": "Z80"}, "cpu Z80, not"), ({"threads": 77}, "77"), ({"memory": "1 GiB"}, "1 GiB")):
        other = made_profile(machine=profile.machine | change)
        assert said in str(other.mismatch("0123abcd", "float32", "cpu"))
    other = made_profile(versions={"torch": "1.0"})
    assert "torch 1.0, not" in str(other.mismatch("0123abcd", "float32", "cpu"))
