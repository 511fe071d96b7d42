"""`profile.json`: what it keeps, when it applies, what it predicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from prefillcli.data.proof import sealed_text
from prefillcli.errors import UsageError
from prefillcli.forecast.profile import Profile, features
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from tests.profile.making import made_profile, made_survey


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    profile, path = made_profile(survey=made_survey()), tmp_path / "profile.json"
    path.write_text(profile.model_dump_json(indent=2))
    assert Profile.load(str(path)) == profile


def test_a_file_without_an_input_is_read(tmp_path: Path) -> None:
    found = json.loads(made_profile().model_dump_json())
    del found["survey"]
    (tmp_path / "profile.json").write_text(json.dumps(found))
    assert Profile.load(str(tmp_path / "profile.json")) == made_profile()


def test_a_file_with_changed_numbers_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "profile.json", sealed_text(made_profile().model_dump_json())
    path.write_text(text)
    assert Profile.load(str(path)) == made_profile()
    path.write_text(json.dumps(json.loads(text) | {"budget_bytes": made_profile().budget_bytes + 1}))
    with pytest.raises(UsageError, match="not as prefill profile wrote it"):
        Profile.load(str(path))


def test_a_file_that_is_not_there_is_no_profile(tmp_path: Path) -> None:
    assert Profile.load(str(tmp_path / "profile.json")) is None
    assert Profile.load(str(tmp_path / "nowhere" / "profile.json")) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a profile"),
        ("[]", "not a profile"),
        ('{"schema_version": 1}', "not a profile"),
        ('{"schema_version": 99}', "a profile of version 99"),
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
    assert "made on cpu, not cuda" in str(profile.mismatch("0123abcd", "float32", "cuda:0"))
    for change, said in (
        ({"cpu": "Z80"}, "another machine (Z80"),
        ({"cores": 999}, "999 cores"),
        ({"threads": 77}, "77"),
        ({"memory_bytes": profile.machine.memory_bytes * 2}, "GiB of memory"),
    ):
        other = made_profile(machine=profile.machine.model_copy(update=change))
        assert said in str(other.mismatch("0123abcd", "float32", "cpu"))
    other = made_profile(versions={"torch": "1.0"})
    assert "torch 1.0, not" in str(other.mismatch("0123abcd", "float32", "cpu"))


def test_a_fit_that_is_none_is_not_read(tmp_path: Path) -> None:
    good = made_profile()
    for change, said in (
        ({"pearson": 0.5}, "Pearson r 0.50"),
        ({"heldout_error_plan": 3.0}, "mean error is 300%"),
        ({"heldout_worst_plan": 0.8}, "largest error is 80%"),
    ):
        weak = good.model_copy(update={"completion": good.times.model_copy(update=change)})
        (tmp_path / "profile.json").write_text(weak.model_dump_json())
        found = Profile.load(str(tmp_path / "profile.json"))
        assert found is not None
        assert found.completion is None
        assert said in str(found.no_completion)
        assert found.modes == good.modes
        with pytest.raises(ValueError, match="no completion times"):
            found.tokens_within(1.0, most=10)


def test_tokens_within_a_time_are_the_most_that_it_allows() -> None:
    profile = made_profile()
    for seconds in (1e-9, 0.01, 1.0, 1e6):
        tokens = profile.tokens_within(seconds, most=50_000)
        assert 1 <= tokens <= 50_000
        parts = max(1.0, tokens / profile.max_model_tokens)
        took = profile.completion.request_seconds(min(tokens, profile.max_model_tokens)) * parts
        assert took <= seconds or tokens == 1
        if tokens < min(profile.max_model_tokens, 50_000):
            assert profile.completion.request_seconds(tokens + 1) > seconds


def seen(pack, window: int | None) -> int:
    """Keys that a pack's tokens see in one layer, counted one by one."""
    count = 0
    for node, parent in enumerate(pack.parents):
        assert parent < node
        for depth in range(pack.starts[node], pack.starts[node] + pack.offsets[node + 1] - pack.offsets[node]):
            count += min(depth + 1, window) if window else depth + 1
    return count


@pytest.mark.parametrize("window", [None, 3, 17, 1000])
def test_features_of_packs_are_counts(window: int | None) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 99, 20)
    prompts = [np.concatenate([shared, rng.integers(0, 99, n)]).astype(np.int32) for n in (5, 9, 30)]
    for pack in make_plan(prompts, Limits(40, 1000, held_tokens=1000)).packs:
        assert features(pack, [(window, 5)]) == (1, len(pack.tokens), len(pack.reads), 5 * seen(pack, window))


def test_seconds_of_a_plan_are_costs_times_counts() -> None:
    profile = made_profile()
    model = profile.completion.model_copy(
        update={"per_pack": 0.5, "per_token": 0.01, "per_read": 0.1, "per_pair": 0.001, "windows": [(None, 2)]}
    )
    prompts = [np.arange(10, dtype=np.int32), np.arange(100, 104, dtype=np.int32)]
    plan = make_plan(prompts, Limits(10, 1000))
    assert len(plan.packs) == 2
    pairs = 2 * (10 * 11 / 2 + 4 * 5 / 2)
    wanted = 2 * 0.5 + 14 * 0.01 + 2 * 0.1 + pairs * 0.001
    assert profile.model_copy(update={"completion": model}).seconds(plan) == pytest.approx(wanted)


@pytest.mark.parametrize("cached", [0, 10, 63, 64, 65, 199])
def test_seconds_of_a_request_are_those_of_its_pack(cached: int) -> None:
    costs = {"per_pack": 3.0, "per_token": 0.5, "per_read": 0.25, "per_pair": 0.001, "windows": [(None, 3), (64, 2)]}
    model = made_profile().times.model_copy(update=costs)
    prompt = np.arange(200, dtype=np.int32)
    apart = Limits(1, 1 << 30, held_tokens=1 << 30)
    pack = make_plan([prompt[:cached], prompt] if cached else [prompt], apart).packs[-1]
    assert pack.held_tokens == cached
    assert model.request_seconds(200, cached) == pytest.approx(model.pack_seconds(pack))


def test_json_has_the_keys_that_others_read() -> None:
    found = json.loads(made_profile().model_dump_json())
    assert found["schema_version"] == 1
    assert found["modes"][1]["max_tokens"] == (90 << 20) // 5_000
