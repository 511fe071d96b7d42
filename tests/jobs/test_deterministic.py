"""Jobs with `--deterministic`: rows have the same bits however they are scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prefillcli
from prefillcli.errors import UsageError
from prefillcli.options.commands import MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.merge import merge_job
from tests.jobs.jobs import read_output, score, texts, write_parquet
from tests.jobs.models import save_model
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.quantised_checkpoints import make_quantised
from tests.unit.walk.families import FAMILIES

ROWS = 60
ANSWER = "prefillcli.engines.torch:TorchEngine.answer"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"layers": 4, "sliding_window": 40, "query_pre_attn_scalar": 16},
    "gpt_oss": FAMILIES["gpt_oss"],
    "lfm2": {"layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}
SCORES = ("score", "logprob_Yes", "logprob_No", "label_mass")


def prompts() -> list[str]:
    """Rows with histories in common, long ones, short ones, and equal ones."""
    found = texts(ROWS - 10)
    found += [f"{'Le renard saute. ' * length}Answer:" for length in (1, 7, 30)]
    return [*found, *found[3:6], "fox", "a", "Answer:", "fox no Answer:"]


def bits_of(rows: list[dict[str, Any]]) -> dict[str, bytes]:
    """What a job says of each row's score, by the row's id."""
    return {row["id"]: np.array([row[name] for name in SCORES]).tobytes() for row in rows}


def write_rows(order: np.ndarray, path: str = "in.parquet") -> str:
    """The prompts in this order, each with its id."""
    asked = prompts()
    write_parquet(path, prompt=[asked[at] for at in order], id=[f"r{at}" for at in order])
    return path


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


@pytest.fixture(
    scope="module",
    params=[each if each == "llama" else pytest.param(each, marks=pytest.mark.nightly) for each in MODELS],
)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "m", family=request.param, **MODELS[request.param])


def flags(judge: Path, **more: Any) -> dict[str, Any]:
    given = {"model": judge, "id_column": "id", "dtype": "bfloat16", "deterministic": True, "memory": "64MiB"}
    return given | more


def merged(judge: Path) -> list[dict[str, Any]]:
    for number in (1, 2):
        assert score("in.parquet", "shards.parquet", shard=f"{number}/2", **flags(judge))["exit_code"] == 0
    given = {"output": "shards.parquet", "quiet": True}
    assert merge_job(load_settings(MergeSettings, given, environment={}))["exit_code"] == 0
    return read_output("shards.parquet")


def resumed(judge: Path) -> list[dict[str, Any]]:
    """Killed in its third pack; then other packs, chunks and threads."""
    given = ["--id-column", "id", "--dtype", "bfloat16", "--deterministic", "-o", "killed.parquet"]
    job = Command("score", "in.parquet", "-m", judge, *given, "--pack-tokens", 300, hold=Hold(ANSWER, 3))
    job.wait_until_held()
    job.kill()
    more = {"pack_tokens": 111, "chunk_tokens": 47, "threads": 2, "resume": True}
    assert score("in.parquet", "killed.parquet", **flags(judge, **more))["exit_code"] == 0
    return read_output("killed.parquet")


def from_python(judge: Path) -> list[dict[str, Any]]:
    table = pq.read_table("in.parquet")
    with prefillcli.Scorer(judge, dtype="bfloat16", deterministic=True, pack_tokens=200) as scorer:
        return pa.concat_tables([scorer.score(table.slice(20)), scorer.score(table.slice(0, 20))]).to_pylist()


def another(**more: Any) -> Callable[[Path], list[dict[str, Any]]]:
    """A job over the rows in another order, with these options."""

    def run(judge: Path) -> list[dict[str, Any]]:
        write_rows(np.random.default_rng(len(more)).permutation(len(prompts())), "shuffled.parquet")
        assert score("shuffled.parquet", "another.parquet", **flags(judge, **more))["exit_code"] == 0
        return read_output("another.parquet")

    return run


WAYS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "small packs": another(pack_tokens=90, chunk_tokens=31, threads=2),
    "no prefix is kept": another(pack_tokens=200, prefix_kv="discard"),
    "prefixes in host memory": another(pack_tokens=200, prefix_kv="offload"),
    "two workers": another(pack_tokens=200, workers=2),
    "streamed weights": another(pack_tokens=400, weights="stream"),
    "a part of the rows": another(sample=17),
    "sections are left out, too": another(evidence=True),
    "two shards": merged,
    "killed and resumed": resumed,
    "from Python": from_python,
}
OFTEN = ("small packs, first come first served", "two workers", "killed and resumed", "from Python")
each_way = pytest.mark.parametrize(
    "way", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.nightly) for each in WAYS]
)


@pytest.fixture(scope="module")
def wanted(judge: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("whole"))
        write_rows(np.arange(len(prompts())))
        assert score("in.parquet", **flags(judge, threads=1))["exit_code"] == 0
        return bits_of(read_output("out.parquet"))


@pytest.mark.sampled(2)
@each_way
def test_rows_have_the_same_bits(judge: Path, wanted: dict[str, bytes], way: str) -> None:
    write_rows(np.arange(len(prompts())))
    found = bits_of(WAYS[way](judge))
    assert len(found) >= 17
    assert [id for id, bits in found.items() if bits != wanted[id]] == []


@pytest.mark.filterwarnings("ignore")  # what other packages say of themselves
def test_weights_that_stay_packed_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(np.arange(5))
    packed = make_quantised("torchao-w8", model, tmp_path / "packed")
    assert score("in.parquet", model=packed, deterministic=True)["exit_code"] == 2
    assert "--deterministic: torchao weights stay packed" in capsys.readouterr().err


def test_an_engine_that_it_does_not_cover_is_refused(model: Path) -> None:
    write_rows(np.arange(5))
    with pytest.raises(UsageError, match="--deterministic: the hf engine"):
        score("in.parquet", model=model, deterministic=True, engine="hf")
