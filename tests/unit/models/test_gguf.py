"""GGUF files that are damaged, incomplete, or would be read as another model are refused before weights are read."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from prefillcli.errors import PrefillError, UsageError
from prefillcli.models.find import read_model_files
from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.models.open import find_model
from tests.gguf_files import part_of, write_gguf
from tests.jobs.models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", folder, kind=Kind.Q8_0)


@pytest.fixture
def file(whole: Path, tmp_path: Path) -> Path:
    """A file that a test may change."""
    return Path(shutil.copy(whole, tmp_path / "m.gguf"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("prefillcli.models.placement.WeightFiles.read", fail)


def refusal(path: Path) -> str:
    with pytest.raises(PrefillError) as caught:
        read_model_files(path)
    text = str(caught.value)
    assert str(path.parent) in text
    assert len(text.splitlines()) <= 3
    return text


def change(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda before: before[:at] + data + before[at + len(data) :]


def replace(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def replaced(before: bytes) -> bytes:
        assert before.count(old) >= 1
        assert len(old) == len(new)
        return before.replace(old, new, 1)

    return replaced


def of_kind(name: str, kind: int) -> Callable[[bytes], bytes]:
    """Another number for the quantisation of a matrix."""

    def changed(before: bytes) -> bytes:
        at = before.index(name.encode()) + len(name) + 4 + 16
        return change(at, struct.pack("<I", kind))(before)

    return changed


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "not a GGUF file: 0 bytes"),
        (lambda data: b"{}" * 50, "not a GGUF file"),
        (change(0, b"GGML"), "not a GGUF file"),
        (change(4, struct.pack("<I", 1)), "GGUF version 1 is not read"),
        (change(4, struct.pack(">I", 3)), "GGUF version 50331648 is not read"),
        (change(8, struct.pack("<Q", 1 << 60)), "truncated"),
        (change(16, struct.pack("<Q", 1 << 60)), "m.gguf"),
        (change(24, struct.pack("<Q", 1 << 62)), "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:-40], "truncated"),
        (of_kind("blk.0.ffn_up.weight", 99), "quantisation 99, which the package gguf does not know"),
        (of_kind("blk.0.ffn_up.weight", 15), "quantisation Q8_K, which cannot be read"),
        (of_kind("blk.0.ffn_up.weight", 12), "rows of 64 numbers in Q4_K"),
        (replace(b"blk.0.ffn_up.weight", b"blk.0.attn_k.weight"[:19]), "two tensors have one name"),
        (replace(b"general.architecture", b"general.archi-tectur"), "so its family is unknown"),
    ],
)
def test_damaged_files_are_refused(file: Path, damage: Callable[[bytes], bytes], says: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    assert says in refusal(file)


@pytest.mark.parametrize(
    ("settings", "tensors", "says"),
    [
        ({"block_count": 5000}, {}, "llama.block_count is 5000; it must be a whole number from 1 to 4,096"),
        ({"embedding_length": 0}, {}, "llama.embedding_length is 0"),
        ({"vocab_size": "many"}, {}, "llama.vocab_size is 'many'"),
        ({"block_count": 3}, {}, "llama.block_count is 3; its tensors are of 2 layers"),
        ({"block_count": 1}, {}, "llama.block_count is 1; its tensors are of 2 layers"),
        ({"rope.scaling.type": "yarn"}, {}, "its positions are scaled (yarn)"),
        ({"attention.sliding_window": 128}, {}, "llama.attention.sliding_window is 128"),
        ({"attn_logit_softcapping": 50.0}, {}, "llama.attn_logit_softcapping is 50"),
        ({"logit_scale": 0.25}, {}, "llama.logit_scale is 0.25"),
        ({"attention.layer_norm_rms_epsilon": None}, {}, "no llama.attention.layer_norm_rms_epsilon"),
        ({"expert_count": 8}, {}, "llama.expert_count is 8"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "blk.0.attn_q.bias among them"),
        ({}, {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}, "scales its positions in a way"),
        ({}, {"rope_factors_long.weight": np.ones(8, np.float32)}, "rope_factors_long.weight among them"),
    ],
)
def test_what_transformers_does_not_read_is_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], tensors: dict[str, Any], says: str
) -> None:
    assert says in refusal(write_gguf(tmp_path / "m.gguf", folder, settings=settings, tensors=tensors))


def place_of(data: bytes, name: str) -> int:
    """Where a matrix's offset is in a file."""
    return data.index(name.encode()) + len(name) + 4 + 16 + 4


def moved(name: str, by: int) -> Callable[[bytes], bytes]:
    """Another offset for a matrix."""

    def changed(before: bytes) -> bytes:
        at = place_of(before, name)
        (offset,) = struct.unpack_from("<Q", before, at)
        return change(at, struct.pack("<Q", offset + by))(before)

    return changed


def at_the_place_of(name: str, other: str) -> Callable[[bytes], bytes]:
    """The offset of another matrix for a matrix."""

    def changed(before: bytes) -> bytes:
        at = place_of(before, other)
        return change(place_of(before, name), before[at : at + 8])(before)

    return changed


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (at_the_place_of("blk.0.attn_k.weight", "blk.0.attn_v.weight"), "before blk.0.attn_k.weight belong to no"),
        (at_the_place_of("blk.0.attn_v.weight", "blk.0.attn_k.weight"), "blk.0.attn_v.weight and blk.0.attn_k.weight"),
        (moved("blk.0.attn_k.weight", -32), "blk.0.attn_k.weight and blk.0.attn_q.weight share bytes"),
        (moved("blk.0.attn_k.weight", 1), "which is not a multiple of 32"),
        (lambda data: data + bytes(32), "32 bytes at its end belong to no tensor"),
    ],
)
def test_tensors_that_share_bytes_or_leave_some_over_are_refused(
    file: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    file.write_bytes(damage(file.read_bytes()))
    assert says in refusal(file)


def test_nor_may_they_in_a_part_of_a_split_file(folder: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", folder, parts=2)
    second = part_of(tmp_path / "m.gguf", 2, 2)
    name = next(each.name for each in read_gguf_header(second).tensors[1:] if len(each.shape) == 2)
    second.write_bytes(moved(name, 32)(second.read_bytes()))
    assert f"32 bytes before {name} belong to no tensor" in refusal(second)


@pytest.mark.parametrize(("alignment", "says"), [(0, "an alignment of 0"), (24, "which is not a power of two")])
def test_an_alignment_that_is_none_is_refused_at_once(folder: Path, tmp_path: Path, alignment: int, says: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", folder, settings={"alignment": alignment})
    data = file.read_bytes().replace(b"\x0f\0\0\0\0\0\0\0llama.alignment", b"\x11\0\0\0\0\0\0\0general.alignment")
    file.write_bytes(data)
    assert says in refusal(file)


def test_a_setting_that_is_there_twice_is_refused(file: Path) -> None:
    file.write_bytes(replace(b"llama.context_length", b"llama.rope.freq_base")(file.read_bytes()))
    assert "two settings are called 'llama.rope.freq_base'" in refusal(file)


def test_an_architecture_that_transformers_cannot_read_is_named(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", folder)
    file.write_bytes(file.read_bytes().replace(b"llama", b"plamo"))
    text = refusal(file)
    assert "'plamo'" in text
    assert "safetensors" in text


def test_a_file_without_a_tokenizer_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mudel"))
    assert "tokenizer.ggml.model is missing" in refusal(file)


def test_a_split_model_without_one_of_its_parts_is_refused(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", folder, parts=3)
    missing = part_of(tmp_path / "m.gguf", 2, 3)
    missing.unlink()
    for named in (first, tmp_path):
        with pytest.raises(UsageError) as caught:
            read_model_files(named)
        assert f"1 of 3 parts of the model are missing, {missing.name} among them" in str(caught.value)


def test_parts_of_another_model_or_under_other_names_are_refused(folder: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", folder, parts=2)
    second = part_of(tmp_path / "m.gguf", 2, 2)
    alone = Path(shutil.copy(first, tmp_path / "alone.gguf"))
    assert "is part 1 of 2 of a model, but its name does not show that" in refusal(alone)
    shutil.copy(first, second)
    assert "is part 1 of 2 of a model" in refusal(first)


def test_a_folder_with_several_models_asks_for_one(whole: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(whole, tmp_path / name)
    with pytest.raises(UsageError) as caught:
        read_model_files(tmp_path)
    assert "holds 2 models: a.gguf, b.gguf" in str(caught.value)
    assert f"--model {tmp_path / 'a.gguf'}" in str(caught.value)


def test_the_image_part_of_a_model_is_none_of_its_own(whole: Path, tmp_path: Path) -> None:
    for name in ("m.gguf", "mmproj-m.gguf"):
        shutil.copy(whole, tmp_path / name)
    assert read_model_files(tmp_path).family == "llama"


def test_a_folder_with_a_configuration_is_told_to_name_its_file(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    text = refusal(file.parent)
    assert "no .safetensors file" in text
    assert f"give the GGUF file itself: {file}" in text


def test_other_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"a model is a directory or a \.gguf file"):
        find_model(str(tmp_path / "model.bin"))
    with pytest.raises(UsageError, match="no such file"):
        find_model(str(tmp_path / "none.gguf"))


def test_every_refused_file_is_refused_again(folder: Path, tmp_path: Path) -> None:
    """Nothing of it is in the cache."""
    file = write_gguf(tmp_path / "m.gguf", folder, settings={"logit_scale": 0.25})
    assert refusal(file) == refusal(file)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_the_header_is_as_the_package_reads_it(whole: Path) -> None:
    import gguf

    header, wanted = read_gguf_header(whole), gguf.GGUFReader(whole)
    assert header.data_start == wanted.data_offset
    ours = [(each.name, each.shape, each.kind, header.data_start + each.offset) for each in header.tensors]
    theirs = [
        (each.name, tuple(int(n) for n in each.shape[::-1]), int(each.tensor_type), int(each.data_offset))
        for each in wanted.tensors
    ]
    assert ours == theirs
    for name, field in wanted.fields.items():
        if not name.startswith("GGUF."):
            told = field.contents()
            found = header.fields[name]
            assert found == (len(told) if isinstance(told, list) and isinstance(found, int) else told), name
