"""Files that no model has are refused before anything is built from them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from prefillcli.errors import UsageError
from prefillcli.models.find import read_model_files
from tests.jobs.models import save_model
from tests.unit.walk.families import make_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
        ({"num_hidden_layers": "many"}, 'num_hidden_layers is "many"'),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 10**6}},
            "partial_rotary_factor is 1000",
        ),
        ({"mamba_chunk_size": 0}, "mamba_chunk_size is 0"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps is "small"'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta is Infinity"),
        ({"text_config": {"vocab_size": "x" * 1000}}, 'vocab_size is "xxx'),
        ({"rope_parameters": "round"}, "config.json"),
        ({"dtype": "float99"}, "config.json"),
        ({"dtype": -1}, "dtype is -1"),
        ({"model_type": ["llama"]}, "config.json"),
        ({"architectures": 7}, "architectures is 7"),
        ({"architectures": ["LlamaForCausalLM", None]}, "architectures is "),
        ({"num_hidden_layers": 4000}, "config.json has 4,000 layers, the weights have 3"),
        ({"vocab_size": 7}, "the shapes of the weights are not those of config.json"),
        ({"hidden_size": 1 << 20}, "the shapes of the weights are not those of config.json"),
    ],
)
def test_a_configuration_of_absurd_numbers_is_refused(saved: Path, changes: dict[str, Any], says: str) -> None:
    change_config(saved, changes)
    assert_refused(saved, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_labels": 10**6}, "num_labels is 1000000, and no tensor of the weights has more than"),
        ({"vision_config": {"num_labels": 10**10}}, "num_labels is 10000000000, and no tensor"),
        ({"vision_config": {"num_hidden_layers": 10**10}}, "num_hidden_layers is 10000000000"),
        ({"intermediate_size": 10**10}, "describes a model that is larger than its weights"),
        ({"head_dim": 1 << 16, "num_attention_heads": 64}, "describes a model that is larger than its weights"),
    ],
)
def test_a_model_that_is_larger_than_its_weights_is_refused(saved: Path, changes: dict[str, Any], says: str) -> None:
    change_config(saved, changes)
    assert_refused(saved, says)


def test_a_model_of_more_modules_than_its_weights_have_is_refused_before_all_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def build(*given: Any, **options: Any) -> torch.nn.Module:
        module = torch.nn.Module()
        for number in range(10**6):
            made.append(number)
            module.add_module(str(number), torch.nn.Identity())
        return module

    make_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", build)
    assert_refused(tmp_path, "describes a model that is larger than its weights")
    assert len(made) < 10**5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
def test_what_is_as_large_as_its_weights_is_taken(tmp_path: Path, family: str) -> None:
    make_model(family).save_pretrained(tmp_path)
    assert read_model_files(tmp_path).family == family


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text_config": {"hidden_size": 16}}, "a llama model has no text_config"),
        ({"quantization_config": "x"}, "config.json: transformers makes no model of it"),
        ({"rope_parameters": [1]}, "config.json"),
        ({"id2label": 7}, "config.json: transformers makes no model of it"),
        ({"model_type": "llava", "text_config": {"model_type": "nosuch"}}, "config.json"),
        ({"model_type": "llava", "text_config": [1]}, "config.json"),
    ],
)
def test_a_configuration_inside_a_configuration_of_the_wrong_type_is_refused(
    saved: Path, changes: dict[str, Any], says: str
) -> None:
    change_config(saved, changes)
    assert_refused(saved, says)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "pipe"), ("generation_config.json", "device"), ("chat_template.jinja", "pipe"),
     ("tokenizer.model", "device")],
)  # fmt: skip
def test_a_pipe_or_a_device_in_a_models_folder_is_refused(saved: Path, name: str, kind: str) -> None:
    (saved / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(saved / name)
    else:
        (saved / name).symlink_to("/dev/zero")
    assert_refused(saved, f"{name}: not a regular file|no config.json")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4000000\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(saved: Path, name: str) -> None:
    (saved / name).write_text(POINTER)
    assert_refused(saved, f"{name}: a Git LFS pointer.*\n.*git lfs pull")


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (sparse, "1,073,741,824 bytes"),
    ],
)
def test_a_configuration_that_is_no_json_is_refused(
    saved: Path, content: bytes | Callable[[Path], None], says: str
) -> None:
    path = saved / "config.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    assert_refused(saved, says)


def test_a_generation_configuration_that_is_no_mapping_is_refused(saved: Path) -> None:
    (saved / "generation_config.json").write_text("7")
    assert_refused(saved, "generation_config.json: not a JSON object")


def shape_beyond_the_bytes(header: dict[str, Any]) -> None:
    first_of(header)["shape"][0] *= 1000


def rows_behind_the_file(header: dict[str, Any]) -> None:
    last = max(
        (tensor for name, tensor in header.items() if name != "__metadata__"), key=lambda each: each["data_offsets"]
    )
    begin, end = last["data_offsets"]
    last["data_offsets"][1] = begin + 1000 * (end - begin)
    last["shape"][0] *= 1000


def begins_before_the_file(header: dict[str, Any]) -> None:
    first_of(header)["data_offsets"][0] = -(10**6)


def at_the_place_of_another(header: dict[str, Any]) -> None:
    keys, values = (header[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "kv")
    keys["data_offsets"] = values["data_offsets"]


def no_shape(header: dict[str, Any]) -> None:
    first_of(header)["shape"] = "wide"


def no_tensor(header: dict[str, Any]) -> None:
    header["model.norm.weight"] = 7


def numbers_as_metadata(header: dict[str, Any]) -> None:
    header["__metadata__"] = {"format": 7}


def first_of(header: dict[str, Any]) -> dict[str, Any]:
    return next(tensor for name, tensor in header.items() if name != "__metadata__")


@pytest.mark.parametrize(
    "change",
    [
        *(shape_beyond_the_bytes, rows_behind_the_file, begins_before_the_file),
        *(at_the_place_of_another, no_shape, no_tensor, numbers_as_metadata),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = saved / "model.safetensors"
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert_refused(saved, "model.safetensors: not a safetensors file|model.safetensors: damaged")


@pytest.mark.parametrize(
    "start", [b"", b"\x01", struct.pack("<Q", 1 << 60), struct.pack("<Q", 200_000) + b"[" * 200_000]
)
def test_a_file_that_is_no_safetensors_file_is_refused(saved: Path, start: bytes) -> None:
    (saved / "model.safetensors").write_bytes(start)
    assert_refused(saved, "not a safetensors file")


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}, "model-00002-of-00002.* missing"),
        ({"weight_map": {"nosuch": "model-1.safetensors"}}, "maps .*nosuch"),
        ({"weight_map": {"lm_head.weight": "../other.safetensors"}}, "is missing"),
        ({"weight_map": {"lm_head.weight": 7}}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(saved: Path, index: Any, says: str) -> None:
    (saved / "model.safetensors").rename(saved / "model-1.safetensors")
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(saved, says)


def test_a_model_in_several_files_is_taken(saved: Path) -> None:
    with safe_open(saved / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    (saved / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == place}, saved / place)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert read_model_files(saved).dtype == torch.float32


@pytest.mark.parametrize("content", [b"{", b"[" * 200_000, b"\x00" * 100, b"[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    from prefillcli.models.open import open_models
    from prefillcli.options.commands import ScoreSettings

    save_model(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        open_models(ScoreSettings(inputs=("x",), model=str(tmp_path / "model")))
    assert str(refused.value).count("\n") < 3


def large_id(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["fox"] = 10**9


def large_added_id(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["id"] = 10**9


def many_tokens(content: dict[str, Any]) -> None:
    content["model"]["vocab"] |= {f"q{number}": 400 + number for number in range(70_000)}


def many_bytes(content: dict[str, Any]) -> None:
    content["name"] = "x" * (17 << 20)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (large_id, "a token with the id 1,000,000,000"),
        (large_added_id, "a token with the id 1,000,000,000"),
        (many_tokens, "has 70,288 tokens; for this model it may have 66,336 at most"),
        (many_bytes, "at most 16,982,016 are read"),
    ],
)
def test_a_tokenizer_out_of_proportion_to_its_model_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    from prefillcli.models.open import open_models
    from prefillcli.options.commands import ScoreSettings

    file = save_model(tmp_path / "model") / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with pytest.raises(UsageError, match=f"tokenizer.json: .*{says}"):
        open_models(ScoreSettings(inputs=("x",), model=str(tmp_path / "model")))


def assert_refused(folder: Path, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        read_model_files(folder)
    assert str(refused.value).count("\n") < 3
    assert len(str(refused.value)) < 600
