"""The methods of `prefill bench`: each is a job of `prefill score`, by the settings in which it differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.options.combinations import reads_images
from prefillcli.options.commands import BenchSettings, ScoreSettings

REFERENCE = "hybrid"  # the method that the others are compared with


@dataclass(frozen=True, slots=True)
class Method:
    """A way to score rows.

    `takes` are options of `prefill bench` that are for some methods only. One that takes `keep` runs once for each
    rate. With `apart` every row is its own window, so that no two share a prefix.
    """

    summary: str  # for readers of the tables
    settings: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()
    apart: bool = False


_KEEP = ("keep", "compress_above")
_BOUND = ("max_flips",)
METHODS = {
    "hf": Method("transformers, one prompt after the other", {"engine": "hf"}),
    "full": Method("the layer walk, each prompt by itself", apart=True),
    REFERENCE: Method("what prefill score does; the others are compared with it"),
    "specprefill": Method("the draft picks the tokens that the model reads", takes=("draft", *_KEEP)),
    "self-draft": Method(
        "the model's own first layers pick the tokens that the others read", {"draft": "self"}, takes=_KEEP
    ),
    "random": Method("random chunks instead: what a draft must beat", {"draft": "random"}, takes=_KEEP),
    "bm25": Method("the sentences most like the question instead", {"draft": "bm25"}, takes=_KEEP),
    "early-exit": Method("the layer walk, which rows leave when they are decided (--exit)", {"exit": True}, _BOUND),
    "first": Method(
        "the models of --first decide rows, and the layer walk reads the others", takes=("first", *_BOUND)
    ),
    "first-exit": Method(
        "the models of --first decide rows, and others leave the layer walk when they are decided",
        {"exit": True},
        takes=("first", *_BOUND),
    ),
    "int8": Method(
        "the model reads rows in int8, and again those that are in doubt (--compute int8)",
        {"compute": "int8"},
        _BOUND,
    ),
    "head": Method("the heads of --head answer, after the layers that they read", takes=("head",)),
    "vllm": Method(
        "vLLM in its own process, with a copy of the model; its prefix cache begins empty", {"engine": "vllm"}
    ),
}
# Options that mean something else in `prefill score`, and those that only some methods take.
_OWN = {"output", "truth", *(name for each in METHODS.values() for name in each.takes)} - {"head"}


def method_names(settings: BenchSettings) -> list[str]:
    """Return the named methods and the reference, or those that are usually compared."""
    if settings.contest.method:
        return [name for name in METHODS if name == REFERENCE or name in settings.contest.method]
    usual = {"hf", REFERENCE, *(("full",) if settings.contest.full else ())}
    usual |= set() if settings.lm.head_file is None else {"head"}
    return [
        name
        for name, each in METHODS.items()
        if (name in usual or ("keep" in each.takes and settings.compares(name))) and _sees(settings, name)
    ]


def _sees(settings: BenchSettings, name: str) -> bool:
    # Whether a method reads what the rows bring.
    return not settings.images.image_column or reads_images(score_settings(settings, name))


def refuse_blind_methods(settings: BenchSettings) -> None:
    """Raise UsageError for a named method that does not read the images of the rows."""
    for name in settings.contest.method:
        if not _sees(settings, name):
            raise UsageError(f"--method {name}: it reads texts alone, and --image-column names images\nleave it out")


def score_settings(settings: BenchSettings, name: str, keep: float | None = None) -> ScoreSettings:
    """Return the settings of the job that a method is, with this keep rate, or the first one of the settings."""
    method = METHODS[name]
    given = {each: settings.value(each) for each in settings.given if each not in _OWN}
    given |= {each: settings.value(each) for each in method.takes} | dict(method.settings)
    if settings.lm.head_file is not None and name != "head":
        del given["head"]  # the others read the model's own
    given |= {"quiet": True, "inputs": settings.input.inputs or ("rows",)}
    given["keep_columns"] = tuple(settings.truth.columns.values())
    if "keep" in method.takes:
        given["keep"] = settings.compression.keep[0] if keep is None else keep
    return ScoreSettings.of({each: own for each, own in given.items() if each in ScoreSettings.options()})
