"""A profile with made-up numbers."""

from __future__ import annotations

from prefillcli.profile.completion import Timing, fit_completion
from prefillcli.profile.machine import this_machine
from prefillcli.profile.store import Confirmation, MemoryPoint, ModeResult, Profile, Trace, TracePoint


def made_profile(**changes: object) -> Profile:
    timings = [
        Timing((1.0, new, 1.0, 2 * new * (cached + new / 2)), 0.01 + 0.001 * new, cached + new, cached, new == 200)
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
        "versions": {"torch": "2"},
    }
    return Profile(**{**fields, **changes})
