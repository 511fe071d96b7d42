"""The file of exits, and what is checked before a later job uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from prefillcli.errors import UsageError
from prefillcli.reading.exits.findings import ExitFindings
from prefillcli.reading.exits.policy import (
    ExitProfile,
    LearntExits,
    exit_profile_at,
    exit_profile_of,
    require_same_job,
)
from prefillcli.reading.exits.proof import LearningRows, prove_exits, recheck_exits
from prefillcli.rows.proof import sealed_text
from tests.unit.reading.exits.populations import LAYERS, population

JOB: dict[str, Any] = {
    "model": "blake3:aa",
    "prompt": "blake3:bb",
    "layers": LAYERS,
    "max_flips": 0.03,
    "flips_of": "each",
    "questions": [{"question": "", "labels": ("No", "Yes"), "label_tokens": "blake3:cc"}],
}
FEW = (3, 5)


def question(**changes: Any) -> dict[str, Any]:
    return {"questions": [JOB["questions"][0] | changes]}


def few_layers(rows: LearningRows) -> LearningRows:
    return LearningRows({layer: rows.readings[layer] for layer in FEW}, rows.final, rows.weights)


def profile_of(exits: Any, findings: ExitFindings) -> ExitProfile:
    learnt = LearntExits(**JOB["questions"][0], exits=exits, findings=findings)
    return ExitProfile(**JOB | {"questions": [learnt]})


@pytest.fixture(scope="module")
def profile() -> ExitProfile:
    found = prove_exits(few_layers(population(1000, seed=3)), layers=LAYERS, max_flips=0.03, labels=("No", "Yes"))
    assert found.policy is not None
    return profile_of(found.policy.to_json(), found.findings)


def test_a_file_brings_everything_back(profile: ExitProfile) -> None:
    again = exit_profile_of(profile.to_json().encode(), "night.exit.json")
    assert again == profile
    assert again.to_json() == profile.to_json()
    assert again.questions[0].policy is not None
    assert profile.questions[0].policy is not None
    assert again.questions[0].policy.to_json() == profile.questions[0].policy.to_json()
    json.loads(profile.to_json(), parse_constant=pytest.fail)  # no NaN or Infinity: other programs read it too


def test_a_job_without_exits_has_a_file_too() -> None:
    found = prove_exits(population(30), layers=LAYERS, max_flips=0.01)
    profile = profile_of(None, found.findings)
    again = exit_profile_of(profile.to_json(), "night.exit.json")
    assert again.questions[0].policy is None
    assert again.questions[0].findings.reason == found.reason


def changed(profile: ExitProfile, **changes: Any) -> str:
    return json.dumps(json.loads(profile.to_json()) | changes)


def changed_question(profile: ExitProfile, **changes: Any) -> str:
    (question,) = json.loads(profile.to_json())["questions"]
    return changed(profile, questions=[question | changes])


def damaged_exits(profile: ExitProfile, change: Any) -> str:
    exits = json.loads(profile.to_json())["questions"][0]["exits"]
    change(exits)
    return changed_question(profile, exits=exits)


def test_damaged_and_foreign_files_are_refused_with_a_reason(profile: ExitProfile) -> None:
    text = profile.to_json()
    for content, said in [
        ("", "it is not an exit profile, or it is damaged"),
        (text[:-20], "it is not an exit profile, or it is damaged"),
        ("[1, 2]", "it is not an exit profile, or it is damaged"),
        ('{"method": "platt"}', "it is not an exit profile, or it is damaged"),
        (changed(profile, schema_version=1), "it is of another version of prefill"),
        (changed(profile, more=1), "it is damaged: more"),
        (changed_question(profile, exits=[{}]), "it is damaged: questions.0.exits: "),
        (changed(profile, layers=FEW[0] + 1), "is not an exit layer"),
        (changed_question(profile, labels=["a", "b", "c"]), "is not for 3 labels"),
        (
            damaged_exits(profile, lambda exits: exits[0]["thresholds"].__setitem__(0, -1)),
            "a threshold is not a number",
        ),
        (damaged_exits(profile, lambda exits: exits[0]["probe"].pop("bias")), "a probe ridge does not consist of"),
        (damaged_exits(profile, lambda exits: exits.append(exits[0])), "do not rise"),
        (changed_question(profile, exits="x"), "it is damaged: questions.0.exits"),
    ]:
        with pytest.raises(UsageError, match=re.escape(said)) as refused:
            exit_profile_of(content, "night.exit.json")
        first, advice = str(refused.value).splitlines()
        assert first.startswith("--exit-profile night.exit.json: ")
        assert advice == "make one with prefill score --exit: it is written beside the report"


def empty(content: Any) -> None:
    content["questions"][0]["exits"] = []


def leave_at_once(content: Any) -> None:
    content["questions"][0]["exits"][0]["thresholds"] = [0.0, 0.0]


def digit(content: Any) -> None:
    content["questions"][0]["findings"]["fitted"] += 1


@pytest.mark.parametrize("change", [empty, leave_at_once, digit])
def test_a_file_with_other_values_than_a_job_wrote_is_refused(
    profile: ExitProfile, tmp_path: Path, change: Any
) -> None:
    """Although it is a profile: `exit_profile_of` takes it."""
    path = tmp_path / "night.exit.json"
    path.write_text(sealed_text(profile.to_json()))
    assert exit_profile_at(str(path)) == profile
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, sort_keys=True))  # the values count, not how they are laid out
    assert exit_profile_at(str(path)) == profile
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="it is not as prefill wrote it\nleave it out"):
        exit_profile_at(str(path))
    del content["checksum"]
    path.write_text(json.dumps(content))
    assert exit_profile_of(path.read_bytes(), str(path)) != profile
    with pytest.raises(UsageError, match="it has no checksum"):
        exit_profile_at(str(path))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model": "blake3:ff"}, "different model"),
        ({"layers": LAYERS + 1}, "different model"),
        ({"prompt": "blake3:ff"}, "different prompt settings"),
        (question(labels=("Yes", "No")), "different labels"),
        ({"model": "blake3:ff"} | question(label_tokens="x"), "different model, label spellings"),
        (question(question="urgent"), "different questions"),
        ({"questions": JOB["questions"] * 2}, "different questions, labels, label spellings"),
        ({"flips_of": "all"}, "it was learnt with flips_of=each, not all\ngive --set flips_of=each"),
        ({"max_flips": 0.01}, "it proves at most 3.00% flips, --max-flips asks for 1.00%"),
    ],
)
def test_a_profile_is_for_its_own_job(profile: ExitProfile, other: dict[str, Any], said: str) -> None:
    require_same_job(profile, "night.exit.json", JOB)
    require_same_job(profile, "night.exit.json", JOB | {"max_flips": 0.05})
    with pytest.raises(UsageError, match=re.escape(said)):
        require_same_job(profile, "night.exit.json", JOB | other)


def test_fresh_rows_of_the_same_kind_pass_the_check(profile: ExitProfile) -> None:
    assert profile.questions[0].policy is not None
    everybody = few_layers(population(60_000, seed=4))
    refused = 0
    for night in range(150):
        rows = everybody.chosen(np.arange(400 * night, 400 * (night + 1)))
        refused += not recheck_exits(profile.questions[0].policy, rows, 0.03).ok
    assert binomtest(refused, 150, 0.05, alternative="greater").pvalue > 0.01


def test_rows_of_another_kind_are_refused_and_the_reason_counts_them(profile: ExitProfile) -> None:
    assert profile.questions[0].policy is not None
    rows = few_layers(population(400, seed=3))
    turned = rows.final.copy()
    turned[:60] = turned[:60, ::-1]
    found = recheck_exits(
        profile.questions[0].policy, LearningRows(rows.readings, turned, rows.weights), 0.03, ("No", "Yes")
    )
    assert not found.ok
    assert found.reason is not None
    for each in found.classes:
        assert each.chance == pytest.approx(binomtest(each.flips, each.rows, 0.03, alternative="greater").pvalue)
        assert f"{each.flips} of {each.rows} rows of '{each.label}' flip" in found.reason
    assert found.reason.endswith("more than a flip rate of 3.00% explains")


def test_the_check_says_what_it_can_find(profile: ExitProfile) -> None:
    assert profile.questions[0].policy is not None
    rows = few_layers(population(400, seed=5))
    found = recheck_exits(profile.questions[0].policy, rows, 0.03, ("No", "Yes"))
    assert found.ok
    assert 0.5 < found.leaving <= 1
    assert found.text.startswith("four of five such checks would find a flip rate of")
    only = rows.chosen(rows.final.argmax(axis=1) == 0)
    few = recheck_exits(profile.questions[0].policy, only, 0.03, ("No", "Yes"))
    assert few.text.endswith("nothing is known of 'Yes'")
    assert few.classes[1].detectable is None
    none = recheck_exits(profile.questions[0].policy, rows.chosen(np.array([], dtype=np.int64)), 0.03)
    assert none.ok
    assert none.text == "there are no rows to check"


def test_a_profile_for_all_rows_is_checked_on_all_rows(profile: ExitProfile) -> None:
    assert profile.questions[0].policy is not None
    rows = few_layers(population(400, seed=5))
    found = recheck_exits(profile.questions[0].policy, rows, 0.03, ("No", "Yes"), "all")
    (everyone,) = found.classes
    by_label = recheck_exits(profile.questions[0].policy, rows, 0.03, ("No", "Yes")).classes
    assert (everyone.label, everyone.rows) == ("all rows", 400)
    assert everyone.flips == sum(each.flips for each in by_label)
