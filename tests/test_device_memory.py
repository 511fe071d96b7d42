"""Memory of CUDA devices: which one is asked, and what counts. Two cards that are tables of numbers stand for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.limits import enforced
from prefillcli.runtime.memory import available_memory, loadable_memory, prepare_allocator, with_peak

MIB = 1 << 20
CARD = torch.device("cuda:1")


class Cards:
    """Two cards of 1,000 MiB. The current one is the first."""

    def __init__(self) -> None:
        self.allocated, self.reserved, self.peak = [0, 0], [0, 0], [0, 0]
        self.fractions = [1.0, 1.0]

    def use(self, card: int, size: int) -> None:
        """Tensors come, and what is reserved for them grows in steps of 20 MiB."""
        self.allocated[card] += size
        self.reserved[card] = max(self.reserved[card], -(-self.allocated[card] // (20 * MIB)) * 20 * MIB)
        self.peak[card] = max(self.peak[card], self.reserved[card])

    def patch(self, patches: pytest.MonkeyPatch) -> None:
        def at(device: torch.device | None = None) -> int:
            return 0 if device is None or device.index is None else device.index

        def forget(device: torch.device | None = None) -> None:
            self.peak[at(device)] = self.reserved[at(device)]

        def limit(fraction: float, device: torch.device | None = None) -> None:
            self.fractions[at(device)] = fraction

        def trim() -> None:
            self.reserved = [-(-used // (20 * MIB)) * 20 * MIB for used in self.allocated]

        for name, function in {
            "memory_allocated": lambda device=None: self.allocated[at(device)],
            "memory_reserved": lambda device=None: self.reserved[at(device)],
            "max_memory_reserved": lambda device=None: self.peak[at(device)],
            "reset_peak_memory_stats": forget,
            "mem_get_info": lambda device=None: (1000 * MIB - self.reserved[at(device)], 1000 * MIB),
            "set_per_process_memory_fraction": limit,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
            "empty_cache": trim,
        }.items():
            patches.setattr(torch.cuda, name, function)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    made = Cards()
    made.patch(monkeypatch)
    return made


def test_the_peak_is_that_of_the_device_that_computes(cards: Cards) -> None:
    cards.use(1, 100 * MIB)
    assert with_peak(lambda: cards.use(1, 30 * MIB), CARD) == (None, 40 * MIB)
    assert with_peak(lambda: cards.use(0, 30 * MIB), CARD) == (None, 0)


def test_memory_that_was_freed_before_counts_again_on_a_card(cards: Cards) -> None:
    cards.use(1, 200 * MIB)
    cards.allocated[1] = 0
    assert with_peak(lambda: cards.use(1, 100 * MIB), CARD) == (None, 100 * MIB)


def test_what_is_measured_on_a_card_is_what_the_limit_counts(cards: Cards) -> None:
    cards.use(1, 90 * MIB)
    _, peak = with_peak(lambda: cards.use(1, 90 * MIB), CARD)
    assert peak is not None
    cards.allocated[1] -= 90 * MIB
    with enforced("cuda:1", peak) as limit:
        assert cards.fractions == [1.0, pytest.approx((100 * MIB + peak) / (1000 * MIB))]
        cards.use(1, 90 * MIB)
        assert cards.reserved[1] == limit, "the step that was measured just fits"
    assert cards.fractions == [1.0, 1.0]


def test_what_is_reserved_without_being_used_is_free(cards: Cards) -> None:
    cards.use(1, 100 * MIB)
    cards.allocated[1] -= 40 * MIB
    assert available_memory(CARD) == loadable_memory(CARD) == 940 * MIB


def test_in_a_control_group_what_it_cannot_drop_has_no_room_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.runtime.memory._GROUP", tmp_path)
    monkeypatch.setattr("prefillcli.runtime.memory._meminfo", lambda: {"MemAvailable": 9000, "SwapFree": 0})
    files = {"memory.max": "1000", "memory.swap.max": "100", "memory.swap.current": "20"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert loadable_memory(torch.device("cpu")) == 1100
    (tmp_path / "memory.stat").write_text("anon 300\nfile 650\nshmem 50\n")
    assert loadable_memory(torch.device("cpu")) == 1100 - 300 - 50 - 20


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_segments_of_device_memory_can_grow_unless_the_user_says_how(name: str) -> None:
    nothing: dict[str, str] = {}
    prepare_allocator(nothing)
    assert nothing == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    said = {name: "backend:cudaMallocAsync"}
    prepare_allocator(said)
    assert said == {name: "backend:cudaMallocAsync"}
