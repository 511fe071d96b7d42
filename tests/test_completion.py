"""The shell's completion, asked for as a shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).parent / "prefill"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A home of its own, and the command on the path."""
    return os.environ | {"HOME": str(tmp_path), "PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed beside this Python")
def test_bash_completes_commands_options_and_their_values(environment: dict[str, str]) -> None:
    ask = "prefill --install-completion; exit $?"  # the shell is found among the command's ancestors
    installed = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=environment)
    assert "bash completion installed" in installed.stdout, installed.stderr
    script = """
        shopt -s expand_aliases; source ~/.bashrc; complete -p prefill
        ask() {
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _prefill_completion prefill; echo "${COMPREPLY[*]}"
        }
        ask prefill in; ask prefill score --spec; ask prefill score --speculation lo; ask prefill bench --rou
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["inspect", "--speculation", "lookup", "--rounds"]


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed beside this Python")
def test_what_the_shell_is_told_is_no_summary(environment: dict[str, str]) -> None:
    """An unknown request of a shell ends with 1, as it does where no job is summed up."""
    asked = environment | {"_PREFILL_COMPLETE": "nonsense_bash"}
    done = subprocess.run(["prefill"], capture_output=True, text=True, env=asked)
    assert (done.returncode, done.stdout) == (1, "")
