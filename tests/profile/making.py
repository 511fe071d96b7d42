"""Profiles and surveys with made-up numbers."""

from __future__ import annotations

from prefillcli.forecast.profile import Confirmation, MemoryPoint, ModeResult, Profile, Trace, TracePoint, this_machine
from prefillcli.forecast.survey import (
    Bin,
    KeepCost,
    Lengths,
    PackLimits,
    PlanCost,
    SharedLevel,
    Sharing,
    Survey,
    SurveyRows,
)
from prefillcli.profile.measuring import Timing, fit_completion
from prefillcli.report.run import versions


def made_profile(**changes: object) -> Profile:
    timings = [
        Timing(
            features=(1.0, new, 1.0, 2 * new * (cached + new / 2)),
            seconds=0.01 + 0.001 * new,
            slowest=0.02 + 0.002 * new,
            rounds=3,
            input_tokens=cached + new,
            cached_tokens=cached,
            heldout=new == 200,
        )
        for cached in (0, 400)
        for new in (100, 200, 400)
    ]
    modes = [
        ModeResult(
            mode=mode,
            points=[MemoryPoint(tokens=n, peak_bytes=(10 << 20) + n * token, seconds=n / 1e3) for n in (1000, 2000)],
            fit_base=10 << 20,
            fit_token=token,
            law_base=9 << 20,
            law_token=0.9 * token,
            law_terms={"residual": 0.9 * token},
            fit_over_law=1 / 0.9,
            predicted_tokens=(90 << 20) // token,
            limited_by="memory",
            confirmations=[
                Confirmation(tokens=(90 << 20) // token, fits=True, peak_bytes=99 << 20, seconds=2.5),
            ],
            max_tokens=(90 << 20) // token,
        )
        for mode, token in (("full", 40_000), ("hybrid", 5_000))
    ]
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
        "traces": [
            Trace(mode=name, tokens=2000, points=[TracePoint(seconds=t / 9, used_bytes=t * size) for t in range(10)])
            for name, size in (("full", 9 << 20), ("hybrid", 2 << 20))
        ],
        "completion": fit_completion(timings, [(None, 2)]),
        "settings": {"model": "<models>/judge & co", "mode": ["full", "hybrid"]},
        "versions": versions(),
    }
    return Profile(**{**fields, **changes})


def made_survey(**changes: object) -> Survey:
    fields: dict[str, object] = {
        "rows": SurveyRows(total=100, prompts=97, errors=3, errors_by_code={"null_prompt": 3}),
        "prompt_tokens": 50_000,
        "lengths": Lengths(
            least=100, mean=515.0, most=900, percentiles={"50": 500, "99": 900},
            histogram=[Bin(low=90, high=300, rows=20), Bin(low=300, high=1000, rows=77)],
        ),
        "sharing": Sharing(
            windows=1, unique_tokens=20_000,
            levels=[SharedLevel(rows=2, tokens=30_000, share=0.6), SharedLevel(rows=10, tokens=5000, share=0.1)],
        ),
        "limits": PackLimits(pack_tokens=4096, max_tokens=9000, chunk_tokens=512),
        "plans": [
            PlanCost(schedule="prefix-tree", prefix_kv="auto", chosen=True, packs=5, computed_tokens=20_100,
                     seconds=7200.0, price=4.5),
            PlanCost(schedule="fifo", prefix_kv="auto", packs=12, computed_tokens=48_000, seconds=9000.0, price=5.6),
        ],
        "keeps": [KeepCost(keep=0.2, compressed_rows=97, kept_tokens=10_000, computed_tokens=9000, seconds=3600.0)],
    }  # fmt: skip
    return Survey(**{**fields, **changes})
