"""A job whose layers are called through torch.compile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prefillcli.errors import UsageError
from tests.score.jobs import Reference, assert_scored, read_output, score, texts, write_parquet


@pytest.mark.nightly
def test_compiled_layers_give_the_scores_of_the_eager_forward(model: Path, reference: Reference) -> None:
    """With code for this machine, resident and streamed."""
    write_parquet("in.parquet", prompt=texts(30))
    for number, weights in enumerate(("resident", "stream")):
        output = f"{number}.parquet"
        options = ["-o", output, "-m", model, "--compile", "--weights", weights, "--pack-tokens", "200", "--quiet"]
        ended = subprocess.run(
            [sys.executable, "-m", "prefillcli", "score", "in.parquet", *map(str, options)],
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["rows"]["scored"] == 30
        assert_scored(read_output(output), [reference.answer(text) for text in texts(30)])


def test_only_the_layer_walk_compiles_layers(model: Path) -> None:
    write_parquet("in.parquet", prompt=texts(2))
    with pytest.raises(UsageError, match="--compile: the hf engine has no layers to compile"):
        score("in.parquet", model=model, engine="hf", compile=True)
