"""The command in processes of its own that can be slowed, held at a point, killed, or sent signals.

They are forked from a server that has torch imported already, so that one starts in milliseconds.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest

from prefillcli.core.scorer import Granularity
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.option import as_typed
from prefillcli.scoring.score import score_job
from tests.jobs import jobs

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "prefillcli.cli",
        "prefillcli.scoring.score",
        "prefillcli.engines.loader",
        "transformers.models.llama.modeling_llama",
        "s3fs",
    ]
)
_PATIENCE = 180.0  # seconds, on a busy machine
_REACHED, _LET_GO = "reached", "let go"


@atexit.register
def _kill_what_is_left() -> None:
    """End what failed tests have left held: multiprocessing waits for it at its own end, which comes after this."""
    if multiprocessing.parent_process() is None:  # not in the command itself, whose workers are its own
        for process in multiprocessing.active_children():
            process.kill()


SMALL = Granularity(batch_rows=10, window_rows=20)
"""Windows of 20 rows and more, where batches have 10."""


@dataclass(frozen=True)
class Hold:
    """Stay at the `call`th call of a function, among those whose last argument ends in `ending`, until let go."""

    function: str
    call: int = 1
    ending: str = ""


def words_of(options: Mapping[str, Any]) -> list[object]:
    """Options of `prefill score` as the command line has them."""
    words: list[object] = []
    for name, value in options.items():
        typed = as_typed(ScoreSettings, name, value)
        if typed.startswith("--set "):
            words += ["--set", f"{name}={value}"]
        else:
            words += [typed] if isinstance(value, bool) else [f"{typed}={value}"]
    return words


class Command:
    """`prefill` with these arguments in another process, every pack flushed when it is done.

    `seconds_per_pack` slows it down. `block_tokens` as in `Granularity`. `environment` is added to its own. Its stdout
    and stderr are files of these names with `log` before them. With `grace_seconds` a signal strikes where the run is
    after that time, and again after a tenth of it. `prepare`, a function of a module, is called right
    before the command.
    """

    def __init__(
        self,
        *arguments: object,
        hold: Hold | None = None,
        seconds_per_pack: float = 0.0,
        block_tokens: int = SMALL.block_tokens,
        environment: Mapping[str, str] | None = None,
        log: str = "",
        grace_seconds: float | None = None,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        for name in (_REACHED, _LET_GO):
            Path(name).unlink(missing_ok=True)
        words = [str(argument) for argument in arguments]
        changes = (dict(environment or {}), hold, seconds_per_pack, block_tokens, grace_seconds, prepare)
        self._log = log
        self._process = _CONTEXT.Process(target=_run, args=(words, os.getcwd(), log, *changes))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def wait_until_held(self) -> None:
        self.wait_until(Path(_REACHED).exists)

    def let_go(self) -> None:
        """Let a held process go on."""
        Path(_LET_GO).touch()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition holds; fail if the process ends before that."""
        end = time.monotonic() + _PATIENCE
        while not condition():
            assert self._process.is_alive(), self.stderr
            if time.monotonic() > end:
                self._give_up("waited too long")
            time.sleep(0.005)

    @property
    def stderr(self) -> str:
        return Path(f"{self._log}stderr").read_text()

    def send(self, signum: int) -> None:
        assert self._process.pid
        os.kill(self._process.pid, signum)

    def end(self) -> int:
        """Wait for the end: the exit code, or the negative number of the signal that ended it."""
        self._process.join(_PATIENCE)
        if self._process.exitcode is None:
            self._give_up("it does not end")
        return self._process.exitcode

    def _give_up(self, why: str) -> NoReturn:
        """Fail without leaving a process behind, which the test runner would wait for at its end."""
        self._process.kill()
        raise AssertionError(why)

    def kill(self) -> None:
        """SIGKILL."""
        self.send(signal.SIGKILL)
        assert self.end() == -signal.SIGKILL


def cut_small_windows(
    monkeypatch: pytest.MonkeyPatch,
    *,
    flush_seconds: float = SMALL.flush_seconds,
    block_tokens: int = SMALL.block_tokens,
) -> None:
    """`SMALL` windows for `tests.jobs.jobs.score`, flushed after so many seconds."""
    small = replace(SMALL, flush_seconds=flush_seconds, block_tokens=block_tokens)
    monkeypatch.setattr("tests.jobs.jobs.granularity", small)


def flush_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests.jobs.jobs.score` writes whatever is finished at once."""
    monkeypatch.setattr("tests.jobs.jobs.granularity", replace(jobs.granularity, flush_seconds=0.0))


def _run(
    arguments: list[str],
    folder: str,
    log: str,
    environment: dict[str, str],
    hold: Hold | None,
    seconds_per_pack: float,
    block_tokens: int,
    grace_seconds: float | None,
    prepare: Callable[[], object] | None,
) -> None:
    os.chdir(folder)
    os.environ |= environment
    fsspec.config.set_conf_env(fsspec.config.conf)  # read once, when the server that this is forked from imported it
    for number, name in ((1, f"{log}stdout"), (2, f"{log}stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    changes = pytest.MonkeyPatch()
    finely = partial(score_job, granularity=replace(SMALL, flush_seconds=0.0, block_tokens=block_tokens))
    changes.setattr("prefillcli.scoring.score.score_job", finely)
    if seconds_per_pack:
        _slow_down(changes, seconds_per_pack)
    if hold:
        _hold_at(changes, hold)
    if grace_seconds is not None:
        changes.setattr("prefillcli.runtime.signals.GRACE_SECONDS", grace_seconds)
        changes.setattr("prefillcli.runtime.signals.AGAIN_SECONDS", grace_seconds / 10)
    from prefillcli.cli import app

    if prepare is not None:
        prepare()
    app(arguments)


def _slow_down(changes: pytest.MonkeyPatch, seconds: float) -> None:
    from prefillcli.engines.torch import TorchEngine

    answer = TorchEngine.answer

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return answer(*arguments)

    changes.setattr(TorchEngine, "answer", slow)


def _hold_at(changes: pytest.MonkeyPatch, hold: Hold) -> None:
    module, _, name = hold.function.partition(":")
    owner: Any = importlib.import_module(module)
    *inner, name = name.split(".")
    for part in inner:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    calls = 0

    def held(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += not hold.ending or str(arguments[-1]).endswith(hold.ending)
        if calls < hold.call:
            return function(*arguments, **options)
        Path(_REACHED).touch()
        while not Path(_LET_GO).exists():
            time.sleep(0.01)
        return function(*arguments, **options)

    changes.setattr(owner, name, held)
