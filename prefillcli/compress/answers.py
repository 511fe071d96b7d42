"""The answers of an engine to requests, without a job around them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefillcli.compress.base import Tick
from prefillcli.compress.request import Request
from prefillcli.engines.base import LabelTokens, PlanEngine
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan


def plan_requests(
    requests: Sequence[Request],
    limits: Limits,
    schedule: str = "prefix-tree",
    *,
    carried: Sequence[CarriedBlock] = (),
    block_tokens: int = 0,
) -> Plan:
    """The plan of the tokens that the target reads. `carried` and `block_tokens` as in `make_plan`."""
    return make_plan(
        [request.tokens for request in requests],
        limits,
        schedule,
        [request.positions for request in requests],
        carried=carried,
        block_tokens=block_tokens,
    )


def answer(
    engine: PlanEngine,
    requests: Sequence[Request],
    labels: Sequence[LabelTokens],
    tick: Tick = lambda tokens: None,
    schedule: str = "prefix-tree",
) -> npt.NDArray[np.float64]:
    """Label log-probabilities, float64 [requests, labels]; `labels` are `Labels.sets`, which the prompts refer to.

    `tick` as in `Engine.answer`. Raises ResourceError if the engine cannot go on.
    """
    found: dict[int, npt.NDArray[np.float64]] = {}
    plan = plan_requests(requests, engine.limits, schedule)
    for answers in engine.answer_all(plan.packs, lambda i: labels[requests[i].prompt.labels], tick):
        found |= {each.prompt: each.logprobs for each in answers}
    return np.stack([found[number] for number in range(len(requests))])
