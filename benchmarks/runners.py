"""A contender of a race in a process of its own, which waits for its turn."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import numpy as np

from benchmarks.memory import tree_memory, tree_processor_seconds
from benchmarks.serving import JOB, PROMPTS, SCORES, Scores, Settings
from prefillcli.plan.trie import TokenArray

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.02  # between two looks at a contender's memory


class Runner:
    """A contender in its own process, ready to score `prompts`. Always close it.

    `way` is where it is found, as module:function. `environment` is the folder of the virtual environment in which it
    runs; None: this one. `seconds_to_start` counts from the start of the process until it can score: imports, weights,
    their conversion, and the start of what it starts itself. `settings` depend on the contender. Raises RuntimeError
    if the process ends before it has answered; what it wrote to stderr says why.
    """

    def __init__(
        self,
        way: str,
        model: Path,
        dtype: str,
        prompts: Sequence[TokenArray],
        settings: Settings | None = None,
        *,
        labels: tuple[int, int],
        environment: Path | None = None,
    ) -> None:
        self._folder = TemporaryDirectory()
        folder = Path(self._folder.name)
        job = {"way": way, "model": str(model.resolve()), "dtype": dtype, "labels": labels, "settings": settings or {}}
        (folder / JOB).write_text(json.dumps(job))
        tokens = np.concatenate([np.empty(0, np.int32), *prompts])
        np.savez(folder / PROMPTS, tokens=tokens, ends=np.cumsum([len(each) for each in prompts], dtype=np.int64))
        python = sys.executable if environment is None else str(environment / "bin" / "python")
        begun = time.monotonic()
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [python, "-m", "benchmarks.serving", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self.about: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise
        self.seconds_to_start = time.monotonic() - begun

    def run(self) -> Scores:
        """P(first label) among the labels, float64 [prompts], computed anew."""
        with suppress(BrokenPipeError):  # then there is no answer
            print(file=self._process.stdin)
        self._answer()
        scores: Scores = np.load(Path(self._folder.name, SCORES))
        return scores

    def run_watched(self) -> tuple[Scores, int, int]:
        """`run`, and bytes of the process and its children: before, and at the highest that was seen on the way.

        Proportional set size: what several processes share counts once. Linux only.
        """
        before = peak = tree_memory(self._process.pid)
        done = Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_SECONDS):
                peak = max(peak, tree_memory(self._process.pid))

        thread = Thread(target=watch)
        thread.start()
        try:
            return self.run(), before, peak
        finally:
            done.set()
            thread.join()

    def processor_seconds(self) -> float:
        """What the process and its children have computed so far, in seconds of one core. Linux only."""
        return tree_processor_seconds(self._process.pid)

    def _answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, which has nothing left to do."""
        self._process.communicate()
        self._folder.cleanup()
