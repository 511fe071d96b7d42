"""What the measurements of a workload show, in sentences."""

from __future__ import annotations

from prefillcli.bench.report import REFERENCE, ExitResult, MethodResult, StateDrift, WorkloadResult
from prefillcli.report.rendering import percent_interval, three_digits


def legend(workload: WorkloadResult) -> str:
    """What the columns of `quick_table` are."""
    rounds = "one round" if workload.rounds < 2 else f"median of {workload.rounds} rounds (smallest-largest)"
    return (
        f"speedup: {REFERENCE}'s seconds over the method's, {rounds}; kept: share of the tokens that the model reads; "
        f"MiB: memory above the weights; flips: rows with another answer than {REFERENCE}'s; AUC: 1 is perfect, "
        "0.5 chance"
    )


def verdicts(workload: WorkloadResult) -> list[str]:
    """What the measurements show, and what they do not: claims are made only where spread or interval support them."""
    methods = {each.method: each for each in workload.methods}
    reference = methods[REFERENCE]
    found = [_of_speed(each, reference, workload.rounds) for each in methods.values() if each is not reference]
    if workload.reference_able is False:
        return found
    for name, each in methods.items():
        chance = methods.get(name.replace("specprefill@", "random@"))
        if chance is not None and chance is not each and not dropped_nothing(each):
            found += _of_flips(each, chance)
    return found


def _of_speed(method: MethodResult, reference: MethodResult, rounds: int) -> str:
    """A difference is one where the slowest round of the one is faster than the fastest of the other."""
    name, own, other = method.method, method.seconds, reference.seconds
    times = f"{three_digits(method.speedup.median)} times {REFERENCE}'s speed"
    if rounds < 2:
        return f"{name}: {times} in the one timed round, no more"
    if own.high < other.low or own.low > other.high:
        return (
            f"{name}: {'faster' if own.high < other.low else 'slower'} than {REFERENCE}, {times} over {rounds} rounds"
        )
    return f"{name}: no difference in speed shown, its rounds and those of {REFERENCE} overlap"


def _of_flips(method: MethodResult, chance: MethodResult) -> list[str]:
    ours, theirs = method.answers.audit, chance.answers.audit
    if ours is None or theirs is None or ours.interval is None or theirs.interval is None:
        return []
    flips = (
        f"flips {percent_interval(ours.interval)} of the answers, {chance.method} {percent_interval(theirs.interval)}"
    )
    better = ours.interval[1] < theirs.interval[0]
    return [f"{method.method}: {flips} (95 %){'' if better else ': not shown to be better than random chunks'}"]


def workload_remarks(workload: WorkloadResult) -> list[str]:
    """What a reader of the tables must know."""
    found = list(workload.notes)
    for each in workload.methods:
        for reason, count in sorted(each.fallbacks.items()):
            found.append(f"{each.method}: {count:,} rows were read in full ({reason})")
        if each.exits is not None:
            found.append(_of_exits(each.method, each.exits, workload.rows))
        if each.drift is not None:
            found.append(_of_drift(each.method, each.drift))
    if undropped := [each.method for each in workload.methods if dropped_nothing(each)]:
        found.append(
            f"{', '.join(undropped)}: nothing was dropped, so this shows nothing: the prompts are short, and their "
            "first and last tokens always stay (--keep-first, --keep-last)"
        )
    if workload.reference_able is False:
        found.append("the model cannot do this task: it is not better than chance, so flips say nothing")
    return found


def _of_exits(method: str, exits: ExitResult, rows: int) -> str:
    """Who left where, and what that changed."""
    early = {name: count for name, count in exits.left.items() if name != "full"}
    where = ", ".join(f"{count / rows:.0%} after layer {name}" for name, count in early.items())
    flips = ", ".join(
        f"{each.flips:,} of {each.rows:,} {each.label!r}"
        + (f" ({percent_interval(each.interval)})" if each.interval is not None else "")
        for each in exits.classes
    )
    return (
        f"{method}: {sum(early.values()) / rows:.0%} of the rows left{f' ({where})' if early else ''} and spared "
        f"{exits.layers_saved:.0%} of the layers; flips by {REFERENCE}'s answer, for --max-flips {exits.max_flips:g}: "
        f"{flips}"
    )


def _of_drift(method: str, drift: StateDrift) -> str:
    """How far the states of recurrent layers have drifted, and where the most."""
    worst = max(drift.layers, key=lambda each: each.median)
    return (
        f"{method}: states of recurrent layers drift by {drift.median:.2f} of their norm, from those after the whole "
        f"prompt to those after the kept tokens (median of {len(drift.layers):,} layers and {drift.rows:,} rows; at "
        f"most {drift.largest:.2f}; most in layer {worst.layer:,}, {worst.median:.2f})"
    )


def dropped_nothing(method: MethodResult) -> bool:
    """Whether a method that drops tokens had none to drop."""
    return method.keep is not None and method.keep < 1 and method.kept == 1 and not method.fallbacks
