"""Files that commands write and later commands trust, with other bytes or values in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from prefillcli.errors import UsageError
from prefillcli.forecast.profile import Profile
from prefillcli.judging.calibration import Calibration, FittedOn, IsotonicSteps, read_calibrations
from prefillcli.reading.exits.policy import ExitProfile, LearntExits, exit_profile_at
from prefillcli.reading.exits.proof import prove_exits
from prefillcli.rows.proof import sealed_text
from tests.fuzz.damage import byte_edits, edited, value_edits, with_values
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.workplace import Workplace
from tests.unit.reading.exits.populations import LAYERS, population
from tests.unit.tools.profile.making import made_profile


def _profile() -> ExitProfile:
    found = prove_exits(population(400, seed=3), layers=LAYERS, max_flips=0.05, labels=("No", "Yes"))
    exits = None if found.policy is None else found.policy.to_json()
    learnt = LearntExits(labels=("No", "Yes"), label_tokens="blake3:cc", exits=exits, findings=found.findings)
    return ExitProfile(
        model="blake3:aa", prompt="blake3:bb", layers=LAYERS, max_flips=0.05, questions=(learnt, learnt)
    )


def _calibration() -> Calibration:
    scaling = IsotonicSteps(scores=(0.125, 0.5, 0.75), probabilities=(0.25, 0.5, 1.0))
    fitted = FittedOn(
        scores="s.parquet", truth="answer", rows=20, rows_by_label={"Yes": 12, "No": 8}, job={"model": "a"}
    )
    return Calibration(labels=("Yes", "No"), scaling=scaling, fitted_on=fitted, folds=5, seed=0)


_READERS: dict[str, tuple[Callable[[], Any], Callable[[str], Any]]] = {
    "x.exit.json": (_profile, exit_profile_at),
    "calibration.json": (_calibration, lambda path: read_calibrations(path, None)[0]),
    "profile.json": (made_profile, Profile.load),
}


@cache
def _sealed(name: str) -> str:
    return sealed_text(_READERS[name][0]().model_dump_json())


def _check(drawn: Any, place: Workplace) -> None:
    """What is read is what was written, or is refused. Without its checksum, a calibration may be anybody's."""
    name, edits, values = drawn
    text = _sealed(name)
    data = edited(text.encode(), edits)
    if values is not None:
        data = json.dumps(with_values(json.loads(text), values)).encode()
    Path(name).write_bytes(data)
    try:
        found = _READERS[name][1](name)
    except UsageError:
        return
    content = json.loads(data)
    if name == "x.exit.json" or content.get("checksum") is not None:
        Path(name).write_text(text)
        assert found == _READERS[name][1](name)


SEALED = Fuzzer(
    "sealed",
    st.tuples(st.sampled_from(sorted(_READERS)), byte_edits, st.none() | value_edits),
    _check,
    per_round=300,
)
