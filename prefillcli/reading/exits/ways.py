"""The ways to decide rows early where --max-flips is given alone: words, the model in int8, and exits.

Those that this job, model or machine lacks are left out, with the reason, and fail no job. The identity of a job has
nothing of this, and what was learnt on one machine holds on another that lacks a way: fewer rows leave there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from prefillcli.asking.questions import QuestionAsking
from prefillcli.errors import UsageError
from prefillcli.models.open import NARROW_COPIES, WORDS, Small, dtype_name
from prefillcli.options.combinations import reads_images
from prefillcli.options.engines import CAPABILITIES, ENGINES
from prefillcli.reading.exits.first import model_width, words_layer
from prefillcli.reading.exits.learning import bounded_classes, provable_of
from prefillcli.reading.exits.report import futile_text
from prefillcli.rows.records import BEFORE
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.reading.exits.policy import ExitProfile
    from prefillcli.reading.exits.report import ExitUse

INT8: Final = "int8"
EXITS: Final = "exits"


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways that are tried, and why others are `left_out`. `unable` is why all rows are read in full.

    `narrow_share` is the time of a product in int8 over that in the model's dtype; None: int8 is not tried.
    """

    unable: str | None = None
    tried: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    narrow_share: float | None = None

    def small(self, inputs: Inputs) -> tuple[Small, ...]:
        """Return the small models to load for them."""
        return () if self.narrow_share is None else (Small(inputs.opened.files, narrow=INT8),)


def ways_of(inputs: Inputs, rows: int, profile: ExitProfile | None = None, learnt: ExitUse | None = None) -> Ways:
    """Return the ways of a job with this number of rows.

    An exit profile, or an earlier attempt at the job that has `learnt`, says whether int8 is needed.
    """
    from prefillcli.models.dtype import times_as_long

    known = profile is not None or learnt is not None
    if learnt is not None and learnt.status == "none":
        return Ways(learnt.reason)
    unable = _why_unable(inputs) or (None if known else _why_futile(inputs, rows))
    if unable is not None:
        return Ways(unable)
    if known and not _uses_int8(profile, learnt):
        why: str | None = "what was learnt does not use it"
    else:
        why = _why_no_int8(inputs)
    if why is None:
        opened = inputs.opened
        share = times_as_long(INT8, dtype_name(opened.files), opened.device, model_width(opened))
        if known or _is_worth_learning(share, provable_of(inputs.settings, inputs.labels.asked, rows).rows, rows):
            return Ways(tried=(WORDS, INT8, EXITS), narrow_share=share)
        why = "to learn from rows that are read twice would take longer than it may save on the others"
    return Ways(tried=(WORDS, EXITS), left_out={INT8: why})


def ways_text(ways: Ways, inputs: Inputs) -> str:
    """Return what is tried and what is left out as one line."""
    tried = list(ways.tried)
    if ways.narrow_share is not None:
        share = f"{ways.narrow_share:.0%} of the time of {dtype_name(inputs.opened.files)}"
        tried[tried.index(INT8)] = f"{INT8} ({share} here)"
    text = f"{', '.join(tried[:-1])} and {tried[-1]}"
    return "; ".join([text, *(f"{name} is left out: {why}" for name, why in ways.left_out.items())])


def _why_unable(inputs: Inputs) -> str | None:
    # Why no row of these may leave, whatever the numbers say.
    engine, opened, asking = inputs.settings.engine.engine, inputs.opened, inputs.rows.asking
    if opened.files.encoder:
        return f"the model is an encoder, which has no {CAPABILITIES['exits']}"
    if "exits" not in ENGINES[engine].can:
        return f"the {engine} engine has no {CAPABILITIES['exits']}"
    if opened.points:
        return "the model's head reads its last layer alone"
    if inputs.labels.measure in (Measure.CHANCES, Measure.VALUES):
        return "the model's head gives numbers that are no probabilities of one answer or another"
    if isinstance(asking, QuestionAsking) and asking.file.further:
        return "a question has several prompts, whose flips are not those of their mean"
    if opened.files.config.get_text_config().num_hidden_layers < 2:
        return "the model has one layer"
    return None


def _why_futile(inputs: Inputs, rows: int) -> str | None:
    # Why reading some rows in full first would be in vain.
    settings, asked = inputs.settings, inputs.labels.asked
    found = provable_of(settings, asked, rows)
    if found.judged >= found.rows_needed:
        return None
    return futile_text(found, bounded_classes(settings, asked), settings.flips.max_flips)


def _uses_int8(profile: ExitProfile | None, learnt: ExitUse | None) -> bool:
    if learnt is not None:
        places = [each.layer - 1 for own in learnt.questions.values() for each in own.layers]
        return any(words_layer(learnt.model_layers) < layer <= BEFORE for layer in places)
    found = [] if profile is None else [each.policy for each in profile.questions]
    return any(
        words_layer(profile.layers) < layer <= BEFORE
        for policy in found
        if policy is not None and profile is not None
        for layer in policy.layers
    )


def _why_no_int8(inputs: Inputs) -> str | None:
    # Why this machine does not read the model in int8 beside the model itself.
    from prefillcli.models.adapters import empty_model
    from prefillcli.models.dtype import FITS, held_bytes, is_packed, require_faster
    from prefillcli.runtime.memory import loadable_memory
    from prefillcli.walk.narrow import check_narrow, narrowed_layers

    settings, files, device = inputs.settings, inputs.opened.files, inputs.opened.device
    if inputs.opened.images.sees and reads_images(settings):
        return "its copy of the model would see no images"
    if settings.adapters.adapter:
        return "its copy of the model would lack the adapter"
    if settings.layers.weights == "stream":
        return "with --weights stream no second copy is held"
    if settings.processes.runner == "ray":
        return "the machines of Ray may be others than this one"
    if is_packed(files, device):
        return "the model's weights are packed"
    copies = settings.processes.workers if device.type == "cpu" else 1
    own = held_bytes(files, device, streams=settings.layers.weights == "auto")
    need = copies * (own + held_bytes(files, device) * (NARROW_COPIES - 1))
    free = loadable_memory(device)
    if free is not None and need > FITS * free:
        return f"the model and its copy would take {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    if not narrowed_layers(empty_model(files)):
        return "no weights of this model can be multiplied so"
    try:
        check_narrow(INT8, device)
        require_faster(INT8, files.dtype, device, model_width(inputs.opened))
    except UsageError as error:
        return str(error).partition("\n")[0].removeprefix(f"--compute {INT8}: ")
    return None


def _is_worth_learning(share: float, learnt: int, rows: int) -> bool:
    # Whether int8 with this `share` of the time may save more on the other rows than it takes on those learnt from.
    return learnt * share < (rows - learnt) * (1 - share)
