"""The tables of a survey: for the terminal, and for pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefillcli.report.numbers import bar, price
from prefillcli.report.survey import Bin, KeepCost, PlanCost, SharedPrefix, Survey
from prefillcli.report.tables import TableRows, numbers_table, pairs_table, stderr_console
from prefillcli.runtime.clock import duration

ESTIMATE = "An estimate, as if the draft chose the first chunks; its own work is not counted"


def print_survey(survey: Survey) -> None:
    """The survey in a few tables, on stderr."""
    console = stderr_console()
    console.print(pairs_table(survey_lines(survey)))
    if survey.sharing.largest:
        console.print(numbers_table(prefix_rows(survey.sharing.largest), text=0))
    console.print(numbers_table(plan_rows(survey.plans), text=2))
    if survey.keeps:
        console.print(numbers_table(keep_rows(survey.keeps), caption=ESTIMATE))


def survey_lines(survey: Survey) -> Iterable[tuple[str, str]]:
    """What a survey found, by name; the histogram of lengths has none."""
    rows, sharing, limits = survey.rows, survey.sharing, survey.limits
    counts = f"{rows.prompts:,} to score of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {rows.errors:,} errors ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    yield "rows", counts
    if rows.too_long:
        yield "too long", f"{rows.too_long:,} rows" + (f", {rows.truncated:,} shortened" if rows.truncated else "")
    if survey.lengths is not None:
        lengths = survey.lengths
        shares = ", ".join(f"{name} % {tokens:,}" for name, tokens in lengths.percentiles.items())
        yield "tokens", f"{survey.prompt_tokens:,} in prompts, {sharing.unique_tokens:,} unique"
        yield "lengths", f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.0f}; {shares}"
        yield "", "\n".join(histogram_lines(lengths.histogram))
    twice = survey.duplicates
    if twice.rows:
        yield "duplicates", f"{twice.rows:,} rows share their whole prompt ({twice.prompts:,} prompts) with others"
    shared = ", ".join(f"{level.share:.1%} by >= {level.rows}" for level in sharing.levels)
    yield "shared", f"of the prompt tokens {shared} rows" if shared else "nothing"
    yield "packs", f"of {limits.pack_tokens:,} tokens; a prompt has at most {limits.max_tokens:,}"
    texts = survey.texts
    if texts is not None:
        more = texts.small_tokens - texts.large_tokens
        yield (
            "rationales",
            (
                f"K,V {'are kept' if texts.kv == 'kept' else 'are not kept, wanted prompts are read again'}: "
                f"{texts.reason}\npacks that can be kept compute {more:,} tokens more than larger ones, "
                f"which compute {texts.large_tokens:,}"
            ),
        )


def prefix_rows(prefixes: Iterable[SharedPrefix]) -> TableRows:
    """Header and one row for each prefix."""
    rows = [["shared by rows", "prefix tokens", "tokens saved", "first row"]]
    return rows + [[f"{p.rows:,}", f"{p.tokens:,}", f"{p.saved:,}", f"{p.first_row}"] for p in prefixes]


def plan_rows(plans: Sequence[PlanCost]) -> TableRows:
    """Header and one row for each plan, a star behind the one that the settings ask for."""
    rows = [["schedule", "prefix K,V", "packs", "computed tokens", *_predictions(plans)]]
    for plan in plans:
        name = plan.schedule + (" *" if plan.chosen else "")
        rows.append([name, plan.prefix_kv, f"{plan.packs:,}", f"{plan.computed_tokens:,}", *_predicted(plan)])
    return rows


def keep_rows(keeps: Sequence[KeepCost]) -> TableRows:
    """Header and one row for each keep rate, a star behind the one that the settings ask for."""
    rows = [["keep rate", "compressed rows", "kept tokens", "computed tokens", *_predictions(keeps)]]
    for each in keeps:
        name, compressed = f"{each.keep:g}" + (" *" if each.chosen else ""), f"{each.compressed_rows:,}"
        rows.append([name, compressed, f"{each.kept_tokens:,}", f"{each.computed_tokens:,}", *_predicted(each)])
    return rows


def _predictions(costs: Sequence[PlanCost | KeepCost]) -> list[str]:
    """Heads of the columns with predictions, where there are any."""
    first = costs[0]
    known = {"predicted": first.seconds, "price": first.price}
    return [name for name, value in known.items() if value is not None]


def _predicted(cost: PlanCost | KeepCost) -> list[str]:
    texts = [duration(cost.seconds)] if cost.seconds is not None else []
    return texts + ([price(cost.price)] if cost.price is not None else [])


def histogram_lines(bins: list[Bin]) -> list[str]:
    """One line with a bar for each bin."""
    most = max((each.rows for each in bins), default=0)
    edges = [f"{each.low:,} - {each.high - 1:,}" for each in bins]
    width = max(map(len, edges), default=0)
    return [f"{edge:>{width}} {bar(each.rows, most)} {each.rows:,}" for edge, each in zip(edges, bins, strict=True)]
