"""What cross-validation found of each method, as a table in the terminal."""

from __future__ import annotations

from prefillcli.report.tables import WIDTH, numbers_table, stderr_console
from prefillcli.stats.calibration import Calibration

HEADER = ["held-out rows", "log loss", "+-", "Brier", "ECE", "accuracy", "AUC"]


def print_calibration(calibration: Calibration, path: str) -> None:
    """Print the methods side by side, and what was chosen."""
    console = stderr_console(WIDTH)
    chosen, fitted = calibration.scaling.method, calibration.fitted_on
    rows = [HEADER]
    for method, held in calibration.held_out.items():
        numbers = [held.log_loss, held.log_loss_spread, held.brier, held.ece, held.accuracy]
        name = "scores as they are" if method == "none" else method
        area = "" if held.auc is None else f"{held.auc:.3f}"
        rows.append([name + (" *" if method == chosen else ""), *(f"{number:.4f}" for number in numbers), area])
    console.print(numbers_table(rows))
    console.print()
    if fitted is not None:
        counts = ", ".join(f"{count:,} {label}" for label, count in fitted.rows_by_label.items())
        left = "".join(f"; left out: {count:,} {reason}" for reason, count in fitted.left_out.items())
        console.print(f"{fitted.rows:,} rows ({counts}){left}")
    console.print(
        f"* {chosen} is fitted on all of them: {path}\n"
        f"+- is the standard deviation over the {calibration.folds} folds. ECE: expected calibration error."
    )
    console.print(f"next: prefill score ... --calibration {path} adds the column probability")
