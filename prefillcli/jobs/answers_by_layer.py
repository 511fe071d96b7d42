"""Answers of the layer walk with what each layer shows of the prompts, and the exits to hold that against."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.compress.answers import plan_requests, require_answered
from prefillcli.compress.base import Tick
from prefillcli.compress.request import Request
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.proof.fingerprints import ModelContents, hash_value
from prefillcli.engines.base import Answer, EarlyExits, LabelTokens, PlanEngine, Treatment
from prefillcli.exits.policy import ExitPolicy
from prefillcli.exits.profile_file import require_same_job
from prefillcli.jobs.exit_profile_file import exit_profile_at
from prefillcli.models.open import Opened
from prefillcli.options.inspect import InspectSettings
from prefillcli.redaction import without_secrets


def answer_by_layer(
    engine: PlanEngine, requests: Sequence[Request], labels: Sequence[LabelTokens], tick: Tick, layers: int
) -> list[Answer]:
    """Answers [requests] of a model that has so many `layers`, with `readings` of every layer but the last.

    `labels` are `Labels.sets`, which the prompts refer to. `tick` as in `Engine.answer`. Raises ResourceError if the
    engine cannot go on.
    """
    treatment = Treatment(EarlyExits(observed=tuple(range(layers - 1))))
    found: dict[int, Answer] = {}
    packs = plan_requests(requests, engine.limits).packs
    for answers in engine.answer_all(packs, lambda i: labels[requests[i].prompt.labels], tick, treatment):
        found |= {each.prompt: each for each in require_answered(answers)}
    return [found[number] for number in range(len(requests))]


def exit_policy(settings: InspectSettings, opened: Opened, labels: Labels) -> ExitPolicy | None:
    """The exits of `--exit-profile`; None if it is not given, or has none.

    Raises UsageError if it is no profile, or is one of another model or other labels. Its job may have had other
    prompts.
    """
    path = settings.exit_profile
    if path is None:
        return None
    shown = without_secrets(path)
    profile = exit_profile_at(path)
    require_same_job(
        profile,
        shown,
        model=ModelContents(opened.files.origin).model(),
        prompt=profile.prompt,
        labels=tuple(labels.names),
        label_tokens=hash_value([[label.name, label.variants] for label in labels.labels]),
        layers=opened.files.config.get_text_config().num_hidden_layers,
        max_flips=profile.max_flips,
    )
    return profile.policy
