"""The commands of docs/tutorial.md, in order, with the sample model; what the page shows of their output is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"


@pytest.mark.nightly
def test_the_tutorial_runs_from_its_first_command_to_the_line_for_cron(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(sh|text|cron)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks].count("sh") > 7
    folder = tmp_path / "tickets"
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    noon = f"UTC{datetime.now(UTC).hour - 12:+}"  # the day must not end between two commands
    environment = {"HOME": str(tmp_path), "PATH": path, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "TZ": noon}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            for line in text.splitlines():
                pattern = r" +".join(".*".join(map(re.escape, word.split("..."))) for word in line.split())
                assert re.search(rf"^{pattern} *$", printed, re.MULTILINE), f"{line!r} is not in:\n{printed}"
            continue
        if kind == "cron":
            text = text.split(maxsplit=5)[5].replace("\\%", "%")
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        printed = run.stdout
        assert run.returncode == 0, f"{text}\n{printed}"
