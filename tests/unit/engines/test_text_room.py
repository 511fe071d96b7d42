"""Room for texts behind prompts, and whether K,V survive scoring."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from prefillcli.engines.memory_plan import TEXTS, keep_plan, plan_packs
from prefillcli.models import law as text_room
from prefillcli.models.law import memory_law
from prefillcli.options.groups import MemoryOptions
from prefillcli.plan.pack import Limits
from tests.unit.walk.test_memory import CPU, LLAMA_8B

GIB = 1 << 30
TEXT = 100


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor for which packs need not be small."""
    monkeypatch.setattr("prefillcli.models.dtype.operations_per_second", lambda dtype: 1e15)


def opened_of(device: str = "cpu"):
    files = SimpleNamespace(head=None, config=LLAMA_8B, dtype=torch.bfloat16)
    return SimpleNamespace(files=files, device=torch.device(device), images_asked=False)


def plan(memory: str, *, text_tokens: int = TEXT, device: str = "cpu", prefix_kv="auto", **given):
    packs = MemoryOptions(memory=memory, prefix_kv=prefix_kv)
    budget = int(float(memory.removesuffix("GiB")) * GIB)
    return plan_packs(opened_of(device), packs, budget, text_tokens=text_tokens, **given)


def bytes_of(limits: Limits, law, budget: int, chunk: int) -> tuple[int, int]:
    """What a kept pack takes while it is walked, and while texts are written, with all that is held beside it."""
    base = law.constant(chunk, CPU) + limits.held_tokens * law.all_key_values
    walked = base + limits.kept_tokens * (law.residual + law.rotary + law.all_key_values)
    return walked, base + limits.written_tokens * law.all_key_values


@pytest.mark.parametrize("gib", [2, 16])
@pytest.mark.parametrize("prefix_kv", ["auto", "discard"])
def test_what_is_kept_fits_the_budget_with_what_is_held_and_with_texts(gib: int, prefix_kv: str) -> None:
    found = plan(f"{gib}GiB", prefix_kv=prefix_kv)
    limits, law = Limits(**found["limits"]), memory_law(LLAMA_8B, torch.bfloat16)
    limits = limits.for_texts()
    assert limits.kept_tokens > 0
    assert max(bytes_of(limits, law, gib * GIB, found["chunk_tokens"])) <= gib * GIB
    assert limits.kept_tokens + TEXT <= limits.written_tokens, "a text fits behind a prompt as long as a pack"
    assert min(limits.tokens, limits.kept_tokens) * law.all_key_values > gib * GIB / 2 or limits.tokens == 65_536
    assert found[TEXTS]["bytes"] == limits.kept_tokens * 128 * 1024


def test_without_texts_nothing_changes() -> None:
    found = plan("4GiB", text_tokens=0)
    assert TEXTS not in found
    assert len(found["asked"]) == 4
    limits = Limits(**found["limits"])
    assert (limits.kept_tokens, limits.kept_packs, limits.written_tokens) == (0, False, 0)
    again = Limits(**plan("4GiB", texts_of="later")["limits"])
    assert replace(again, kept_tokens=0, kept_held_tokens=0, written_tokens=0) == limits, "packs stay as they are"


def test_packs_are_cut_so_that_they_can_be_kept_where_that_costs_less_than_reading_again() -> None:
    roomy = plan("64GiB")
    assert (roomy[TEXTS]["kv"], Limits(**roomy["limits"]).tokens) == ("kept", 65_536)
    tight = plan("4GiB", texts_of="some")
    limits = Limits(**tight["limits"])
    assert tight[TEXTS]["kv"] == "kept"
    assert limits.kept_packs
    assert limits.tokens == limits.kept_tokens < 65_536
    assert f"cut to {limits.tokens:,} tokens" in tight[TEXTS]["reason"]


def test_packs_stay_large_where_small_ones_would_wait_for_weights() -> None:
    """Streamed weights are read for each pack: eight small packs take as long as eight large ones."""
    some = plan("4GiB", texts_of="some", least_tokens=60_000)
    assert some[TEXTS]["kv"] == "again"
    assert Limits(**some["limits"]).tokens == 65_536
    assert "reading the wanted ones again takes less" in some[TEXTS]["reason"]
    assert Limits(**some["limits"]).for_texts().kept_tokens > 16, "those that are wanted are read in packs that fit"
    assert plan("4GiB", texts_of="all", least_tokens=60_000)[TEXTS]["kv"] == "kept", "all would be read again"


def test_what_is_wanted_later_is_read_again() -> None:
    found = plan("64GiB", texts_of="later")
    assert found[TEXTS]["kv"] == "again"
    assert not Limits(**found["limits"]).kept_packs


def test_no_text_is_written_where_not_one_fits() -> None:
    law = memory_law(LLAMA_8B, torch.bfloat16)
    limits = Limits(1000, 1000, held_tokens=100)
    found = text_room.limits_with_texts(limits, law, room=60 * 128 * 1024, device=CPU, text_tokens=TEXT)
    assert found == limits
    assert not text_room.keep_or_again(found, chunk_tokens=64, least_tokens=0, texts_of="all").kept


def test_states_behind_prompts_count() -> None:
    law = replace(memory_law(LLAMA_8B, torch.bfloat16), states=40 << 20)
    limits = text_room.limits_with_texts(Limits(65_536, 10**6), law, room=8 * GIB, device=CPU, text_tokens=TEXT)
    assert limits.kept_end == pytest.approx((40 << 20) / (132 * 1024), rel=0.01)
    assert limits.kept_size(1000, 10) == pytest.approx(1000 + 10 * limits.kept_end)


def test_on_a_gpu_what_is_kept_is_in_host_memory_and_what_is_written_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_room, "available_memory", lambda device: 40 * GIB)
    found = plan("16GiB", device="cuda")
    limits, law = Limits(**found["limits"]).for_texts(), memory_law(LLAMA_8B, torch.bfloat16)
    assert 2 * limits.kept_tokens * law.all_key_values <= 40 * GIB, "pinned memory is rounded up"
    device = law.constant(found["chunk_tokens"], torch.device("cuda")) + limits.held_tokens * law.all_key_values
    assert device + limits.kept_tokens * (law.token + law.key_value) <= 16 * GIB
    assert device + limits.written_tokens * law.all_key_values <= 16 * GIB
    halved = Limits(**plan("16GiB", device="cuda", share=0.5)["limits"])
    assert halved.kept_tokens <= limits.kept_tokens


def test_a_resumed_job_takes_the_decision_over() -> None:
    before = plan("4GiB", texts_of="some", least_tokens=60_000)
    now = plan("4GiB", texts_of="some")
    assert (before[TEXTS]["kv"], now[TEXTS]["kv"]) == ("again", "kept")
    assert keep_plan(before, now) == before
    less = keep_plan(plan("8GiB", texts_of="some") | {"asked": now["asked"]}, now)
    assert less == now, "it does not fit any more"
    longer = plan("4GiB", texts_of="some", text_tokens=200)
    assert keep_plan(before, longer) == longer, "other texts are asked for"
