"""Which models are taken, which refused, and what their files say before weights load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefillcli.errors import ResourceError, UsageError
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.open import find_model
from prefillcli.models.rehearsal import rehearse
from prefillcli.runtime.device_key import choose_device
from prefillcli.walk import forest, own_cache
from prefillcli.walk.forest import UnsupportedModelError, register
from prefillcli.walk.own_cache import LayerPast
from tests.unit.walk.families import make_config, make_model
from tests.unit.walk.test_walk import assert_equal, eager, mixed, walked

UNTESTED = [
    "granite",
    "gpt_neox",
    "opt",
    "cohere2",
    "olmo3",
    "stablelm",
    "phimoe",
    "gpt_bigcode",
    "modernbert-decoder",
]
REFUSED = ["hrm_text", "recurrent_gemma", "t5"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", UNTESTED)
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # gpt_bigcode
def test_other_families_pass_the_rehearsal_and_equal_their_eager_forward(family: str) -> None:
    register()
    model, prompts = make_model(family), mixed()
    rehearse(model, model.config)
    torch.testing.assert_close(walked(model, prompts, chunk=97), eager(model, prompts), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", REFUSED)
@pytest.mark.filterwarnings("ignore")  # some of these warn while they are built
def test_what_cannot_be_walked_is_refused(family: str, tmp_path: Path) -> None:
    register()
    config = make_config(family)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")

    def load() -> None:
        allowed = read_model_files(tmp_path).config
        rehearse(make_model(family), allowed)

    with pytest.raises(UnsupportedModelError, match=f"{family}.* cannot (be walked|score prompts)"):
        load()


def test_the_rehearsal_finds_wrong_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = make_model("granite")
    assert not rehearse(model, model.config).own_cache
    monkeypatch.setattr(forest, "merge_into", lambda *parts: None)  # queries see their own node only
    found = rehearse(model, model.config)
    assert found.own_cache, "transformers' own attention is not broken"
    assert "differ by" in str(found.reason)
    monkeypatch.setattr(own_cache, "fork_past", lambda past: LayerPast())  # and neither is what they keep
    with pytest.raises(UnsupportedModelError, match="granite cannot be walked"):
        rehearse(model, model.config)


def test_the_rehearsal_finds_a_window_that_attention_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    model = make_model("olmo3")
    assert model.config.sliding_window > 57, "longer than the rehearsal's prompts"
    plain = forest.ForestAttention.__call__
    monkeypatch.setattr(
        forest.ForestAttention, "__call__", lambda self, *a, **k: plain(self, *a, **{**k, "sliding_window": None})
    )
    found = rehearse(model, model.config)
    assert found.own_cache
    assert "sliding window" in str(found.reason)


def test_a_saved_model_loads_and_is_walked(saved: Path) -> None:
    files = read_model_files(saved)
    assert (files.family, files.dtype, files.max_length) == ("llama", torch.float32, 4096)
    model = load_model(files, torch.device("cpu"))
    prompts = mixed()
    reference = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").eval()
    assert_equal(walked(model, prompts, chunk=97), eager(reference, prompts))


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_dtype_is_the_checkpoints_unless_told(tmp_path: Path, dtype: str, wanted: torch.dtype) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    files = read_model_files(tmp_path, dtype=dtype)
    assert files.dtype == wanted
    assert next(load_model(files, torch.device("cpu")).parameters()).dtype == wanted


def test_position_encodings_that_depend_on_the_length_end_where_they_change(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 512,
    }
    make_model("phi3", rope_parameters=rope, original_max_position_embeddings=512).save_pretrained(tmp_path)
    files = read_model_files(tmp_path)
    assert (files.max_length, files.max_length_apart) == (512, 4096)


def test_a_directory_without_safetensors_says_what_it_found(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no \.safetensors file \(found pytorch_model\.bin"):
        read_model_files(saved)


def test_a_truncated_weight_file_is_found_before_loading(saved: Path) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"model\.safetensors: damaged: truncated"):
        read_model_files(saved)


def test_directories_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        read_model_files(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        find_model(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(UsageError, match="no_such_family"):
        read_model_files(tmp_path)


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="no such kind of device"):
        choose_device("abacus")
    with pytest.raises(UsageError, match="only cpu, cuda and mps"):
        choose_device("meta")
    if not torch.backends.mps.is_available():
        with pytest.raises(ResourceError, match="no Apple GPU"):
            choose_device("mps")
    with pytest.raises(ResourceError, match="CUDA devices found"):
        choose_device("cuda:99")


def test_a_torch_for_cpus_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for build in (None, "13.0"):
        monkeypatch.setattr(torch.version, "cuda", build)
        with pytest.raises(ResourceError, match="CUDA devices found") as refused:
            choose_device("cuda:99")
        assert ("is built for CPUs; install a CUDA build" in str(refused.value)) == (build is None)


def test_tied_embeddings_are_not_missing_weights(tmp_path: Path) -> None:
    tied = make_model("llama", tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    prompts = mixed()
    model = load_model(read_model_files(tmp_path), torch.device("cpu"))
    assert_equal(walked(model, prompts, chunk=97), eager(tied, prompts))
