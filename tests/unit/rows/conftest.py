"""Files of outputs are tested as part of a job that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefillcli.errors import resumable


@pytest.fixture(autouse=True)
def _in_a_job() -> Iterator[None]:
    with resumable(True):
        yield
