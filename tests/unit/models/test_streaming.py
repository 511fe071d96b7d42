"""Weights that are read layer by layer give the bits that weights in memory give, in the memory they may take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefillcli.errors import ContentChangedError, ResourceError
from prefillcli.models import placement, rehearsal
from prefillcli.models.find import ModelFiles, read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.streamed_layers import StreamedLayers, WeightFiles, load_streamed, spread
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.walk import LayerWalk, PassSpeed
from tests.unit.walk.families import each_family, make_model
from tests.unit.walk.generated import beginnings, greedy, written
from tests.unit.walk.test_leaving import LeaveAfter
from tests.unit.walk.test_walk import Prompt, mixed, single, three_levels
from tests.unit.walk.tiny_models import make_tiny_model

CPU = torch.device("cpu")
SMALL_PACKS = Limits(300, 1 << 20, held_tokens=1 << 20)


def walked_twice(walk: LayerWalk, prompts: list[Prompt], limits: Limits = SMALL_PACKS) -> Tensor:
    """The logits of two passes over the packs of a plan, one after the other."""
    packs = make_plan(prompts, limits).packs * 2
    return torch.cat([logits for pack in packs for logits in walk.read_logits(pack)])


def resident(files: ModelFiles, prompts: list[Prompt], limits: Limits = SMALL_PACKS) -> Tensor:
    with closing(LayerWalk(load_model(files, CPU), chunk_tokens=97)) as walk:
        return walked_twice(walk, prompts, limits)


@contextmanager
def streamed(files: ModelFiles, *, slots: int = 2) -> Iterator[tuple[LayerWalk, StreamedLayers]]:
    """A walk whose layers are read with room for so many."""
    model, layers = load_streamed(files, CPU, memory=least_memory(files, slots))
    with closing(layers), closing(LayerWalk(model, chunk_tokens=97, layers=layers)) as walk:
        yield walk, layers


def least_memory(files: ModelFiles, slots: int = 2) -> int:
    _, layers = load_streamed(files, CPU, memory=1 << 30)
    layers.close()
    return layers.resident_bytes + slots * layers.slot_bytes


@pytest.fixture
def llama(tmp_path: Path) -> ModelFiles:
    make_model("llama", num_hidden_layers=6).save_pretrained(tmp_path)
    return read_model_files(tmp_path)


def assert_same_bits(files: ModelFiles, *, slots: int = 2) -> None:
    prompts = mixed()
    with streamed(files, slots=slots) as (walk, _):
        found = walked_twice(walk, prompts)
    wanted = resident(files, prompts)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("saved", "dtype"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "float32")])
@each_family
def test_streamed_weights_give_the_same_bits(family: str, saved: str, dtype: str, tmp_path: Path) -> None:
    make_model(family, getattr(torch, saved)).save_pretrained(tmp_path)
    assert_same_bits(read_model_files(tmp_path, dtype=dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "family",
    ["gpt2", "opt", "modernbert-decoder", "gemma4_text", "nemotron_h", "qwen3_next", "deepseek_v3", "bloom", "gptj"],
)
def test_other_families_are_rehearsed_while_their_layers_are_read(family: str, tmp_path: Path) -> None:
    make_tiny_model(family).save_pretrained(tmp_path)
    assert_same_bits(read_model_files(tmp_path))


def test_one_that_differs_from_its_own_forward_is_refused_and_nothing_is_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("gpt2").save_pretrained(tmp_path)
    closed: list[StreamedLayers] = []
    close = StreamedLayers.close
    monkeypatch.setattr(StreamedLayers, "close", lambda source: (closed.append(source), close(source)))
    monkeypatch.setattr(rehearsal, "_REHEARSAL_TOLERANCE", {torch.float32: 0.0})
    with pytest.raises(UnsupportedModelError, match=r"differ by .* from its own forward"):
        load_streamed(read_model_files(tmp_path), CPU, memory=1 << 30)
    assert len(closed) == 1


def without_prefix(folder: Path, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): each for name, each in load_file(folder / "model.safetensors").items()}


def test_the_weights_of_gpt2_are_read_by_the_names_of_its_hub_files(tmp_path: Path) -> None:
    make_tiny_model("gpt2").save_pretrained(tmp_path)
    own = without_prefix(tmp_path, "transformer.")
    own["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a mask, which is no weight any more
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_bits(read_model_files(tmp_path))


@pytest.mark.parametrize("slots", [3, 6])
def test_layers_that_stay_give_the_same_bits(llama: ModelFiles, slots: int) -> None:
    assert_same_bits(llama, slots=slots)


def test_tied_embeddings_are_there_once(tmp_path: Path) -> None:
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    files = read_model_files(tmp_path)
    assert_same_bits(files)
    with streamed(files) as (walk, layers):
        embedding = walk.model.get_input_embeddings().weight
        assert walk.model.get_output_embeddings().weight is embedding
        assert layers.resident_bytes == embedding.nbytes + walk.model.get_decoder().norm.weight.nbytes


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_in_several_files_give_the_same_bits(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert_same_bits(read_model_files(tmp_path))


def test_a_checkpoint_of_the_model_without_its_head_is_read_by_its_own_names(tmp_path: Path) -> None:
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    own = without_prefix(tmp_path, "model.")
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_bits(read_model_files(tmp_path))


# Memory, and what is read.


@pytest.mark.parametrize("slots", [2, 5])
def test_no_more_weights_are_held_than_allowed(llama: ModelFiles, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = least_memory(llama, slots)
    model, layers = load_streamed(llama, CPU, memory=memory)
    made: list[int] = []
    empty = torch.empty

    def counted(*arguments: object, **options: object) -> Tensor:
        found: Tensor = empty(*arguments, **options)  # type: ignore[call-overload]
        if threading.current_thread().name == "weights":
            made.append(found.nbytes)
        return found

    monkeypatch.setattr(torch, "empty", counted)
    with closing(layers), closing(LayerWalk(model, chunk_tokens=97, layers=layers)) as walk:
        walked_twice(walk, mixed())
    assert made == [layers.slot_bytes] * slots
    assert layers.resident_bytes + sum(made) <= memory < layers.resident_bytes + sum(made) + layers.slot_bytes
    assert all(weight.is_meta for layer in walk._ends.layers for weight in layer.parameters())


@pytest.mark.parametrize(("slots", "read_again"), [(2, 6), (5, 3), (6, 0)])
def test_a_pass_reads_what_does_not_stay(llama: ModelFiles, slots: int, read_again: int) -> None:
    with streamed(llama, slots=slots) as (walk, layers):
        assert layers.pass_bytes == read_again * layers.layer_bytes(0)
        packs = make_plan(single(), Limits(400, 400)).packs * 5
        for pack in packs:
            list(walk.read_logits(pack))
    ahead = 2 * layers.layer_bytes(0)  # the next pack's first layers
    wanted = 6 * layers.layer_bytes(0) + 4 * layers.pass_bytes
    assert wanted <= layers.bytes_read <= wanted + ahead


@given(st.integers(1, 200).flatmap(lambda layers: st.tuples(st.integers(0, layers), st.just(layers))))
def test_layers_that_stay_are_spread_evenly(numbers: tuple[int, int]) -> None:
    count, layers = numbers
    found = spread(count, layers)
    assert len(set(found)) == count
    assert found == sorted(found)
    assert set(found) <= set(range(layers))
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_too_little_memory_is_refused_with_what_is_enough(llama: ModelFiles) -> None:
    with pytest.raises(ResourceError, match=r"(?s)too little for .*room for two layers") as refused:
        load_streamed(llama, CPU, memory=least_memory(llama) - 1)
    assert str(refused.value).count("\n") < 3
    with streamed(llama) as (_, layers):
        assert len(layers) == 6


def test_a_pass_that_was_stopped_does_not_disturb_the_next(llama: ModelFiles) -> None:
    prompts = mixed()
    with streamed(llama) as (walk, layers):
        for index in (0, 1, 0, 5, 5, 3, 0, 4, 1, 2):
            with layers.use(index) as layer:
                assert not any(weight.is_meta for weight in layer.parameters())
        assert torch.equal(walked_twice(walk, prompts), resident(llama, prompts))


def test_a_walk_that_is_stopped_or_writes_texts_gives_the_same_bits(llama: ModelFiles) -> None:
    rows = beginnings(three_levels())
    (pack,) = make_plan([row.prompt for row in rows], Limits(10**6, 10**6)).packs

    def stop(tokens: float) -> None:
        raise KeyboardInterrupt

    with streamed(llama) as (walk, _):
        with pytest.raises(KeyboardInterrupt):
            list(walk.read_logits(pack, stop))
        found = written(walk, rows, greedy(4))
    with closing(LayerWalk(load_model(llama, CPU), chunk_tokens=97)) as walk:
        assert found == written(walk, rows, greedy(4))


def walked_with_exits(walk: LayerWalk, prompts: list[Prompt], leaving: dict[int, int], *, peek: bool) -> Tensor:
    """As `walked_twice`, with reads that leave."""
    rule, rows = LeaveAfter(leaving, peek=peek), []
    for pack in make_plan(prompts, SMALL_PACKS).packs * 2:
        rule.pack = pack
        rows += list(walk.read_logits(pack, exits=rule))
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "peek"), [("llama", True), ("mixtral", False)])
def test_packs_that_end_early_give_the_same_bits(family: str, peek: bool, tmp_path: Path) -> None:
    make_model(family, num_hidden_layers=6).save_pretrained(tmp_path)
    files, prompts = read_model_files(tmp_path), three_levels()
    leaving = {number: number % 3 for number in range(len(prompts) - 1)}  # only the last pack is read to the end
    assert len(make_plan(prompts, SMALL_PACKS).packs) > 2
    with streamed(files) as (walk, _):
        found = walked_with_exits(walk, prompts, leaving, peek=peek)
    with closing(LayerWalk(load_model(files, CPU), chunk_tokens=97)) as walk:
        assert torch.equal(found, walked_with_exits(walk, prompts, leaving, peek=peek))


@pytest.mark.parametrize("peek", [False, True])
def test_a_pack_that_ends_early_leaves_the_other_layers_unread(llama: ModelFiles, peek: bool) -> None:
    (pack,) = make_plan(single(), Limits(400, 400)).packs
    rule = LeaveAfter({0: 1}, peek=peek)
    rule.pack = pack
    with streamed(llama) as (walk, layers):
        for passes in range(1, 4):
            assert list(walk.read_logits(pack, exits=rule)) == []
            until = time.monotonic() + 20
            while {slot.layer for slot in layers._slots if slot.loaded} != {0, 1} and time.monotonic() < until:
                time.sleep(0.001)
            assert {slot.layer for slot in layers._slots} == {0, 1}, "the layers that the next pass begins with"
            one = layers.layer_bytes(0)
            # The third was on its way when all had left: it took the place of the first, which is read again.
            assert layers.bytes_read in [each * one for each in range(2, 2 + 2 * passes + 1)]


def test_waiting_for_a_layer_is_counted(llama: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    read = WeightFiles.read

    def slow(self: WeightFiles, *arguments: object) -> None:
        time.sleep(0.002)
        read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightFiles, "read", slow)
    with streamed(llama) as (_, layers):
        with layers.use(0):
            pass
        assert layers.seconds_waited >= 0.002 * len(layers._files[0].pieces)


# Experts.


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_few_tokens_read_only_the_experts_that_they_use(family: str, tmp_path: Path) -> None:
    make_model(family, **{"num_experts" if family == "qwen3_moe" else "num_local_experts": 16}).save_pretrained(
        tmp_path
    )
    files = read_model_files(tmp_path)
    prompts = [prompt[:3] for prompt in three_levels()[:1]]
    one_pack = Limits(100, 100)
    wanted = resident(files, prompts, one_pack)
    with streamed(files) as (walk, layers):
        layers.expect(3, 1)
        assert torch.equal(walked_twice(walk, prompts, one_pack), wanted)
    few = layers.bytes_read
    with streamed(files) as (walk, layers):
        layers.expect(10_000, 10_000)
        assert torch.equal(walked_twice(walk, prompts, one_pack), wanted)
    assert 0 < few < 0.7 * layers.bytes_read


@pytest.mark.parametrize("expected", [1, 10_000])
def test_experts_are_right_whatever_number_of_tokens_was_expected(expected: int, tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    files, prompts = read_model_files(tmp_path), mixed()
    with streamed(files) as (walk, layers):
        layers.expect(expected, expected)
        assert torch.equal(walked_twice(walk, prompts), resident(files, prompts))


# Files that are not what they were.


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def written_to(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(
    ("harm", "says"), [(cut_short, "was cut short|has changed"), (written_to, "has changed while the model was read")]
)
def test_a_file_that_changes_under_the_walk_ends_it(
    llama: ModelFiles, harm: Callable[[Path], None], says: str
) -> None:
    with streamed(llama) as (walk, _):
        walked_twice(walk, single())
        harm(llama.path / "model.safetensors")
        with pytest.raises(ContentChangedError, match=f"model.safetensors.*({says})"):
            walked_twice(walk, single())


@pytest.mark.parametrize("spaces", [1, 2])
def test_weights_behind_a_header_that_is_not_padded_are_read(llama: ModelFiles, spaces: int) -> None:
    wanted = resident(llama, mixed())
    file = llama.path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little") + spaces
    file.write_bytes(
        length.to_bytes(8, "little") + data[8 : 8 + length - spaces] + b" " * spaces + data[8 + length - spaces :]
    )
    with streamed(read_model_files(llama.path)) as (walk, _):
        torch.testing.assert_close(walked_twice(walk, mixed()), wanted)


def test_a_conversion_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    monkeypatch.setattr(placement, "MergeModulelist", placement.WeightRenaming)  # so that the real one is unknown
    with pytest.raises(UnsupportedModelError, match="in a way that is not known"):
        load_streamed(read_model_files(tmp_path), CPU, memory=1 << 30)


# How large packs should be.


def test_packs_hide_reading_from_where_arithmetic_takes_as_long() -> None:
    assert PassSpeed(read_seconds=5.0, token_seconds=4e-5).hiding_tokens == 125_000


def test_nothing_is_to_be_hidden_where_all_layers_stay(llama: ModelFiles) -> None:
    with streamed(llama, slots=6) as (_, layers):
        assert layers.measure_speed().hiding_tokens == 0
    with streamed(llama) as (_, layers):
        assert layers.measure_speed().hiding_tokens > 0
