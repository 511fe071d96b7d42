from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.nursery import Nursery


@pytest.fixture(scope="package")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery
