"""Models in GGUF format, against transformers' own eager forward of the same file."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefillcli.errors import ResourceError
from prefillcli.models.gguf import prune_cached
from prefillcli.rows.proof import ModelContents
from prefillcli.runtime.user_cache import cache_folder
from tests.gguf_files import GgufReference, part_of, rotary_factors, write_gguf
from tests.jobs.jobs import (
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.models import save_model
from tests.jobs.processes import Command, Hold

PROMPTS = texts(12)
LABELS = "Yes= Yes,No= No"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def file(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight bits with a chat template."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "eight.gguf", chat_model, kind=Kind.Q8_0)


@pytest.fixture(scope="module")
def small(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller one with the same tokens."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "draft.gguf", draft, kind=Kind.Q4_1)


def answers(file: Path) -> Any:
    reference = GgufReference(file)
    return [reference.answer(text) for text in PROMPTS]


def job(model: Path, **flags: Any) -> dict[str, Any]:
    source = write_parquet("in.parquet", prompt=PROMPTS)
    return score(source, model=model, labels=LABELS, **{"dtype": "float32", "chat": False, **flags})


def cached() -> list[str]:
    """The folders in the cache."""
    place = cache_folder() / "gguf"
    return sorted(each.name for each in place.iterdir() if each.is_dir()) if place.is_dir() else []


def scores(path: str = "out.parquet") -> list[float]:
    return [row["score"] for row in read_output(path)]


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q4_0])
def test_scores_equal_the_eager_forward(chat_model: Path, kind: Kind) -> None:
    file = write_gguf(Path("own.gguf").absolute(), chat_model, kind=kind)
    assert job(file)["exit_code"] == 0
    assert_scored(read_output("out.parquet"), answers(file))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_of_whole_numbers_scores_as_the_model_that_it_was_made_of(family: str) -> None:
    folder = save_model(Path("plain").absolute(), family=family)
    file = write_gguf(
        Path("own.gguf").absolute(),
        folder,
        architecture=family,
        settings={"attention.key_length": 16, "attention.value_length": 16},
    )
    if family == "qwen3":  # whose heads transformers takes to be of 128 numbers: it does not read their width
        assert "transformers" in job(file)["error"]
        return
    assert job(file)["exit_code"] == 0
    reference = Reference(folder)
    wanted = [reference.answer(reference.ids(text, special=False)) for text in PROMPTS]  # the file asks for no BOS
    assert_scored(read_output("out.parquet"), wanted)


QWEN35 = {
    "attention.key_length": 16, "attention.value_length": 16, "full_attention_interval": 2, "ssm.conv_kernel": 4,
    "ssm.group_count": 2, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4,
    "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
EXPERTS35 = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32, "feed_forward_length": None,
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_spec("transformers.integrations.gguf") is None, reason="an older transformers")
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
def test_families_that_transformers_converts_as_safetensors(architecture: str, kind: Kind) -> None:
    """Whose norms begin at 1 in the file, and whose value heads stand in another order; one has a layer more, which
    predicts a second token."""
    sizes: dict[str, Any] = {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        },
    }  # fmt: skip
    settings, more = dict(QWEN35), {}
    if architecture == "qwen35":
        settings |= {"block_count": 5, "nextn_predict_layers": 1}
        more = {"blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    else:
        settings |= EXPERTS35
        sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2}
    family = "qwen3_5_text" if architecture == "qwen35" else "qwen3_5_moe_text"
    torch.manual_seed(0)  # of the decay, which the model draws itself: with some, float32 is 1e-5 from float64
    folder = save_model(Path("plain").absolute(), family=family, layers=4, **sizes)
    file = write_gguf(
        Path("own.gguf").absolute(), folder, architecture=architecture, kind=kind, settings=settings, tensors=more
    )
    assert job(file)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert_scored(rows, answers(file))
    if kind == Kind.F32:
        reference = Reference(folder)
        assert_scored(rows, [reference.answer(reference.ids(text, special=False)) for text in PROMPTS])


def test_chats_pass_through_the_template_of_the_file(file: Path) -> None:
    chats = [[{"role": "user", "content": text}] for text in texts(6)]
    source = write_jsonl("in.jsonl", [{"messages": chat} for chat in chats])
    assert score(source, model=file, dtype="float32")["exit_code"] == 0
    reference = GgufReference(file)
    wanted = [
        reference.answer(
            reference.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"],
            labels=(("Yes",), ("No",)),
        )
        for chat in chats
    ]
    assert_scored(read_output("out.parquet"), wanted)


def test_control_tokens_in_the_data_stay_text(file: Path) -> None:
    source = write_jsonl("in.jsonl", [{"prompt": "<s> and </s>. Answer:"}])
    assert score(source, model=file, labels=LABELS, dtype="float32", chat=False)["exit_code"] == 0
    reference = GgufReference(file)
    (row,) = read_output("out.parquet")
    assert row["prompt_tokens"] > len(reference.ids("<s> and </s>. Answer:"))


@pytest.mark.parametrize("says", [{"add_bos_token": True}, {"pre": "llama-bpe"}, {"pre": "tekken"}], ids=str)
def test_texts_begin_with_bos_where_the_file_says_so(model: Path, reference: Reference, says: dict[str, Any]) -> None:
    """By its own setting, or by how it splits texts."""
    file = write_gguf(Path("bos.gguf").absolute(), model, tokenizer=says)
    prompts = [text.replace("'", "") for text in PROMPTS]  # which all three split alike
    score(write_parquet("in.parquet", prompt=prompts), model=file, labels=LABELS, dtype="float32", chat=False)
    assert_scored(read_output("out.parquet"), [reference.answer(text) for text in prompts])


ROLES = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"  # as DeepSeek spells them


def test_role_tokens_in_wide_letters_are_one_token_each(chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    free = [number for number, token in enumerate(tokens) if len(token) == 1 and not token.isascii()][-2:]
    kinds = [3 if number in (*free, *tokenizer.all_special_ids) else 1 for number in range(len(tokens))]
    for number, role in zip(free, ROLES, strict=True):
        tokens[number] = role
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    file = write_gguf(
        Path("roles.gguf").absolute(),
        chat_model,
        tokenizer={
            "tokens": tokens,
            "token_type": kinds,
            "merges": [" ".join(each) for each in merges if set(tokens) >= {*each, "".join(each)}],
            "chat_template": "{{ bos_token }}{% for each in messages %}"
            + "{{ each.content }}".join(ROLES)
            + "{% endfor %}",
        },
    )
    assert score(write_parquet("in.parquet", prompt=PROMPTS), model=file, dtype="float32")["exit_code"] == 0
    reference = Reference(chat_model)
    user, assistant = ([number] for number in free)
    wanted = [
        reference.answer(
            [reference.tokenizer.bos_token_id, *user, *reference.ids(text, special=False), *assistant],
            labels=(("Yes",), ("No",)),
        )
        for text in PROMPTS
    ]
    assert_scored(read_output("out.parquet"), wanted)


def test_a_file_whose_tokens_follow_other_rules_now_is_another_job(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr("prefillcli.rows.proof._GGUF_RULES", 1)
        job(file)
    done = job(file, resume=True)
    assert done["exit_code"] == 4
    assert "tokenizer" in done["error"]


def test_what_is_not_known_of_a_tokenizer_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(Path("own.gguf").absolute(), model, tokenizer={"add_moods": True, "pre": None})
    assert job(file, dry_run=True)["exit_code"] == 0
    told = capsys.readouterr().err
    assert "not known here, and not applied: tokenizer.ggml.add_moods" in told
    assert "no tokenizer.ggml.pre" in told


def test_rotary_factors_are_taken_over(model: Path) -> None:
    """As in the files of Llama 3.1, where the oracle is the model that the file was made of."""
    folder = Path(shutil.copytree(model, "scaled"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(config))
    factors = rotary_factors(AutoModelForCausalLM.from_pretrained(folder))
    assert factors.max() == pytest.approx(8)
    file = write_gguf(Path("scaled.gguf").absolute(), folder, tensors={"rope_freqs.weight": factors})
    assert job(file)["exit_code"] == 0
    reference = Reference(folder)
    wanted = [reference.answer(reference.ids(text, special=False)) for text in PROMPTS]
    assert_scored(read_output("out.parquet"), wanted)


def test_quantised_weights_are_computed_in_bfloat16_and_whole_ones_as_they_are_saved(
    file: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda *_: 0.5)  # a processor made for bfloat16
    job(file, dtype="auto")
    assert read_report()["settings"]["dtype"] == "auto"
    assert read_report()["dtype"]["name"] == "bfloat16"
    plain = write_gguf(Path("plain.gguf").absolute(), chat_model, kind=Kind.F32)
    job(plain, dtype="auto", overwrite=True)
    assert read_report()["dtype"]["name"] == "float32"
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda *_: 6.0)
    job(file, dtype="auto", overwrite=True)
    assert read_report()["dtype"]["name"] == "float32"


@pytest.mark.parametrize(("weights", "dtype"), [("auto", "float32"), ("resident", "bfloat16")])
def test_packed_weights_need_no_room_in_float32(
    file: Path, weights: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.models import dtype as chosen

    files = chosen.read_model_files(file, dtype="float32")
    sizes = chosen.held_bytes(files, torch.device("cpu"), streams=True), chosen.held_bytes(files, torch.device("cpu"))
    assert sizes[0] < sizes[1]
    monkeypatch.setattr(chosen, "times_as_long", lambda *_: 6.0)
    monkeypatch.setattr(chosen, "loadable_memory", lambda device: sum(sizes) / 2 / chosen.FITS)
    assert job(file, dtype="auto", weights=weights)["exit_code"] == 0
    assert read_report()["dtype"]["name"] == dtype


def test_all_parts_of_a_split_model_are_read(chat_model: Path) -> None:
    whole = write_gguf(Path("whole.gguf").absolute(), chat_model, kind=Kind.Q8_0)
    job(whole)
    wanted = scores()
    Path("parts").mkdir()
    first = write_gguf(Path("parts/m.gguf").absolute(), chat_model, kind=Kind.Q8_0, parts=3)
    for named in (first, part_of(Path("parts/m.gguf"), 2, 3), Path("parts")):
        assert job(named, overwrite=True)["exit_code"] == 0
        assert scores() == wanted


def test_the_folder_of_a_file_is_as_good_as_the_file(file: Path) -> None:
    job(file)
    wanted = scores()
    assert job(file.parent, output="again.parquet")["exit_code"] == 0
    assert scores("again.parquet") == wanted
    assert read_report()["fingerprint"] == read_report("again.run.json")["fingerprint"]


def test_the_second_start_reads_what_the_first_has_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(file)
    wanted, kept = scores(), cached()
    assert len(kept) == 1
    assert not list((cache_folder() / "gguf").rglob("*.safetensors"))

    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the file is described again")

    monkeypatch.setattr("prefillcli.models.gguf._describe", fail)
    assert job(file, overwrite=True)["exit_code"] == 0
    assert scores() == wanted
    assert cached() == kept


def test_a_damaged_cache_is_made_again(file: Path) -> None:
    job(file)
    wanted = scores()
    (tokenizer,) = (cache_folder() / "gguf").glob("*/tokenizer.json")
    before = tokenizer.read_bytes()
    damaged = bytearray(before)
    damaged[-3] ^= 0x40
    tokenizer.write_bytes(damaged)
    assert job(file, overwrite=True)["exit_code"] == 0
    assert scores() == wanted
    assert tokenizer.read_bytes() == before


@pytest.mark.parametrize("how", ["no room", "no right to write", "full while it is written"])
def test_without_room_in_the_cache_the_scores_are_the_same(
    file: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(file)
    wanted = scores()
    shutil.rmtree(cache_folder() / "gguf")
    if how == "no room":
        usage = shutil.disk_usage(".")
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    elif how == "no right to write":
        (cache_folder() / "gguf").write_text("a file where the folder should be")
    else:
        monkeypatch.setattr("prefillcli.models.gguf._sync", _full_disk)
    capsys.readouterr()
    assert job(file, overwrite=True)["exit_code"] == 0
    assert scores() == wanted
    assert cached() == []
    assert "warning:" in capsys.readouterr().err


def _full_disk(path: Path) -> None:
    raise OSError(28, os.strerror(28))


def test_what_killed_processes_left_in_the_cache_goes(file: Path) -> None:
    source = write_parquet("in.parquet", prompt=PROMPTS)
    flags = ["--model", file, "--labels", LABELS, "--dtype", "float32", "--no-chat"]
    place = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    killed = Command("score", source, *flags, hold=Hold("prefillcli.models.gguf:_seal", 1), environment=place)
    killed.wait_until_held()
    killed.kill()
    (left,) = (cache_folder() / "gguf").glob("eight-*.tmp")
    (left / "tokenizer.json").write_bytes(b"half of it")
    assert job(file, overwrite=True)["exit_code"] == 0
    assert_scored(read_output("out.parquet"), answers(file))
    assert not left.exists()
    assert len(cached()) == 1


def kept(name: str, days: float) -> Path:
    """A folder in the cache as another process left it, of 1,000 bytes, last used so many days ago."""
    folder = cache_folder() / "gguf" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(996))
    (folder / "prefillcli.digest").write_text("none")
    os.utime(folder / "prefillcli.digest", (then := time.time() - days * 86400, then))
    return folder


def test_what_was_used_longest_ago_leaves_the_cache() -> None:
    for name, days in (("old", 3.0), ("older", 4.0), ("new", 0.0), ("unused", 31.0)):
        kept(name, days)
    prune_cached(3000)
    assert cached() == ["new", "old", "older"]
    prune_cached(2500, wanted=1000)
    assert cached() == ["new"]
    prune_cached(0)
    assert cached() == []


def test_what_a_process_uses_or_makes_stays_in_the_cache() -> None:
    place = kept("used", 40.0).parent
    kept("idle", 40.0)
    kept("made.abc.tmp", 0.0)
    kept("left.pruned.tmp", 0.0)  # by one that was killed while it removed it
    with (place / "used.use").open("w") as used, (place / "made.lock").open("w") as made:
        fcntl.flock(used, fcntl.LOCK_SH)
        fcntl.flock(made, fcntl.LOCK_EX)
        prune_cached(0)
        assert cached() == ["made.abc.tmp", "used"]
    prune_cached(0)  # as after kill -9, which ends locks too
    assert cached() == []


def test_a_job_keeps_its_own_model_in_a_small_cache(file: Path) -> None:
    kept("other", 1.0)
    assert job(file, gguf_cache="1")["exit_code"] == 0
    own = cached()
    assert len(own) == 1
    assert "other" not in own
    with (cache_folder() / "gguf" / f"{own[0]}.use").open("w") as use, pytest.raises(BlockingIOError):
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    prune_cached(0)
    assert cached() == own


def test_another_file_under_the_same_name_is_another_job(model: Path, chat_model: Path) -> None:
    named = Path("named.gguf").absolute()
    write_gguf(named, chat_model)
    job(named)
    before = hash_of(named)
    moved = Path(shutil.copy(named, "moved.gguf"))
    assert hash_of(moved) == before
    assert job(moved, resume=True)["exit_code"] == 0
    named.unlink()
    write_gguf(named, model)
    assert hash_of(named) != before
    done = job(named, resume=True)
    assert done["exit_code"] == 4
    assert "model" in done["error"]


def hash_of(file: Path) -> str:
    return ModelContents(file).model()


def test_a_file_that_changes_while_the_job_runs_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(shutil.copy(file, "own.gguf")).absolute()
    from prefillcli.models import streamed_layers as loading

    load = loading.load_streamed

    def load_then_change(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        data = bytearray(own.read_bytes())
        data[-3] ^= 1
        own.write_bytes(data)
        return loaded

    monkeypatch.setattr(loading, "load_streamed", load_then_change)
    done = job(own)
    assert done["exit_code"] == 4
    assert "own.gguf has changed while the model was read from it" in done["error"]


@pytest.mark.parametrize(
    "flags",
    [
        {"weights": "stream", "weights_memory": "1MiB"},
        {"engine": "hf"},
        {"workers": 2},
    ],
    ids=["streamed", "hf", "two workers"],
)
def test_other_ways_to_run_give_the_same_scores(file: Path, flags: dict[str, Any]) -> None:
    job(file)
    wanted = scores()
    assert job(file, overwrite=True, **flags)["exit_code"] == 0
    assert scores() == pytest.approx(wanted, abs=1e-6)


def test_a_file_can_be_the_draft(file: Path, small: Path, chat_model: Path) -> None:
    prompts = [text * 20 for text in PROMPTS]
    source = write_parquet("long.parquet", prompt=prompts)
    done = score(source, model=file, draft=small, keep=0.5, compress_above=64, labels=LABELS, chat=False)
    assert done["exit_code"] == 0, done
    assert {row["method"] for row in read_output("out.parquet")} == {"specprefill"}


def test_a_dry_run_reads_no_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("prefillcli.models.placement.WeightFiles.read", fail)
    assert job(file, dry_run=True)["exit_code"] == 0
    assert len(cached()) == 1


def open_for_vllm(file: Path) -> Any:
    from prefillcli.engines.base import LoadRequest
    from prefillcli.models.open import open_models
    from prefillcli.options.commands import ScoreSettings
    from prefillcli.options.load import load_settings

    given = {"inputs": ["in.parquet"], "model": str(file), "engine": "vllm", "dtype": "float32"}
    settings = load_settings(ScoreSettings, given, environment={})
    return LoadRequest(open_models(settings), settings.packs, {"kv_cache_memory_bytes": 1 << 20})


def test_vllm_is_handed_a_folder_of_safetensors(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.engines import vllm

    handed: list[Path] = []
    monkeypatch.setattr(vllm, "VllmEngine", lambda path, **options: handed.append(path))
    vllm.load(open_for_vllm(file))
    (folder,) = handed
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {each.name for each in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32


def test_vllm_is_refused_where_the_cache_has_no_room(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.engines import vllm

    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="the cache, which has no room"):
        vllm.load(open_for_vllm(file))


def test_a_row_is_inspected(file: Path) -> None:
    from prefillcli.options.commands import InspectSettings
    from prefillcli.options.load import load_settings
    from prefillcli.tools.inspect import inspect_job

    source = write_parquet("in.parquet", prompt=PROMPTS)
    given = {"inputs": [str(source)], "model": str(file), "row": "3", "labels": LABELS, "chat": False, "quiet": True}
    settings = load_settings(InspectSettings, {**given, "dtype": "float32"}, environment={})
    summary = inspect_job(settings)
    assert summary["exit_code"] == 0, summary
    assert summary["score"] == pytest.approx(GgufReference(file).answer(PROMPTS[3]).score, abs=1e-5)
