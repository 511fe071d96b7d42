"""Profiles and surveys with made-up numbers."""

from __future__ import annotations

from prefillcli.forecast.profile import Confirmation, Curve, ModeResult, Profile, this_machine
from prefillcli.forecast.survey import Cost, KeepCost, Lengths, Survey, SurveyRows
from prefillcli.report.run import versions


def made_curve(pack: float = 0.01, token: float = 0.001, pair: float = 1e-8) -> Curve:
    """A curve of packs that take these seconds, and these more for each token and pair."""
    lengths = [0, *(16 * 2**n for n in range(12)), 1 << 40]
    works = [token * tokens for tokens in lengths]
    points = [(tokens, work, pack + work) for tokens, work in zip(lengths, works, strict=True)]
    return Curve(costs=(token, 0.0, pair), windows=[(None, 2)], points=points, error=0.08, rounds=3)


def made_profile(**changes: object) -> Profile:
    modes = []
    for mode, token in (("full", 40_000), ("hybrid", 5_000)):
        tokens = (90 << 20) // token
        run = Confirmation(tokens=tokens, fits=True, peak_bytes=99 << 20, seconds=2.5)
        modes.append(
            ModeResult(
                mode=mode,
                law_base=9 << 20,
                law_token=token,
                predicted_tokens=tokens,
                confirmations=[run],
                max_tokens=tokens,
            )
        )
    fields: dict[str, object] = {
        "created": "2026-11-21T00:00:00+00:00",
        "model": "0123abcd",
        "model_name": "<models>/judge & co",
        "family": "llama",
        "dtype": "float32",
        "device": "cpu",
        "machine": this_machine("cpu"),
        "budget_bytes": 100 << 20,
        "chunk_tokens": 512,
        "max_model_tokens": 1 << 17,
        "modes": modes,
        "completion": made_curve(),
        "settings": {"model": "<models>/judge & co", "mode": ["full", "hybrid"]},
        "versions": versions(),
    }
    return Profile(**{**fields, **changes})


def made_survey(**changes: object) -> Survey:
    fields: dict[str, object] = {
        "rows": SurveyRows(total=100, prompts=97, errors=3, errors_by_code={"null_prompt": 3}),
        "prompt_tokens": 50_000,
        "unique_tokens": 20_000,
        "windows": 1,
        "lengths": Lengths(
            least=100, mean=515.0, most=900, percentiles={"50": 500, "99": 900},
            histogram=[{"low": 90, "high": 300, "rows": 20}, {"low": 300, "high": 1000, "rows": 77}],
        ),
        "limits": {"pack_tokens": 4096, "max_tokens": 9000, "max_length": 8192, "chunk_tokens": 512},
        "plan": Cost(packs=5, computed_tokens=20_100, seconds=7200.0, price=4.5),
        "keeps": [KeepCost(keep=0.2, compressed_rows=97, kept_tokens=10_000, computed_tokens=9000, seconds=3600.0)],
    }  # fmt: skip
    return Survey(**{**fields, **changes})
