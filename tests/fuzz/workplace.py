"""Where examples run: tiny models that all share, and an empty folder for each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.jobs.models import CHAT_TEMPLATE, save_model


@dataclass(frozen=True)
class Workplace:
    """A folder for examples. Its models are made when the first example needs them."""

    folder: Path

    @cached_property
    def model(self) -> str:
        """A causal language model whose tokenizer has no chat template."""
        return str(save_model(self.folder / "models" / "plain", hidden=16, layers=1))

    @cached_property
    def chat_model(self) -> str:
        """The same with a chat template."""
        return str(
            save_model(self.folder / "models" / "chat", hidden=16, layers=1, chat_template=CHAT_TEMPLATE, seed=1)
        )

    @contextmanager
    def emptied(self) -> Iterator[Path]:
        """An empty folder, which is the working directory inside."""
        before, own = Path.cwd(), self.folder / "example"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        os.chdir(own)
        try:
            yield own
        finally:
            os.chdir(before)
