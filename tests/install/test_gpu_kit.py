"""The GPU kit, built and run on the CPU: without a network, beside nothing but what its machine is said to have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_steps import STEPS
from recipes.gpu_kit import MOST_BYTES, PRESENT, ROOT, lacking

DIST = os.environ.get("DIST", "")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
NO_NETWORK = ["unshare", "--map-root-user", "--net"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DIST, reason="make test-install builds what is installed")]

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "gpu-kit"
    (wheel,) = Path(DIST).glob("*.whl")
    words = ["--wheel", str(wheel), "--output", str(folder), "--python", PYTHON]
    subprocess.run([sys.executable, str(ROOT / "recipes/gpu_kit.py"), *words], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A python3 with the packages that a machine is said to have and what these require, without all that is in the
    kit."""
    folder = tmp_path_factory.mktemp("machine")
    there = folder / "site-packages"
    there.mkdir()
    found, left = set(lacking(PYTHON)), list(PRESENT)
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            package = distribution(name)
        except PackageNotFoundError:  # like triton, on a machine without a GPU
            continue
        needed = [Requirement(line) for line in package.requires or []]
        left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
        for part in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            (there / part).unlink(missing_ok=True)
            (there / part).symlink_to(package.locate_file(part))
    venv.create(folder / "env")
    (own,) = (folder / "env/lib").glob("python*/site-packages")
    (own / "machine.pth").write_text(f"{there}\n")
    return folder / "env/bin/python"


@pytest.fixture
def run(kit: Path, machine: Path, tmp_path: Path) -> Run:
    """Run the kit's script; returns the exit code and its results."""
    offline = NO_NETWORK if subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode == 0 else []

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ}
        own = {"PYTHON": str(machine), "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*offline, str(kit / "run.sh"), *words], env=kept | own, cwd=tmp_path, capture_output=True, timeout=600
        )
        file = tmp_path / "out/results.json"
        assert file.exists(), done.stderr.decode()[-4000:]
        assert sorted(each.name for each in file.parent.iterdir()) == ["log.txt", "results.json"]
        return done.returncode, json.loads(file.read_text())

    return run


def test_the_whole_kit_runs_without_gpu_and_network(kit: Path, run: Run) -> None:
    assert sum(file.stat().st_size for file in kit.rglob("*")) < MOST_BYTES
    begun = time.monotonic()
    code, results = run()
    assert time.monotonic() - begun < 600
    steps = results["steps"]
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(STEPS, "passed"), steps
    assert code == 0
    assert results["device"]["name"] == "cpu"
    paths = {(each["path"], each["dtype"]): each for each in steps["doctor"]["paths"]}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in paths["flash-cpu", "float32"]["kernels"]
    assert steps["tests"]["counts"]["passed"] >= 3
    assert all(each["float32_most"] < 1e-5 for each in steps["parity"]["errors"].values())
    speeds = steps["speed"]["speeds"]
    assert [each["mode"] for each in speeds] == ["full", "hybrid"] * 4
    assert all(each["tokens_per_second"] > 0 for each in speeds)
    assert 0 < steps["smaller"]["errors"]["int8"] < 0.1
    assert steps["longest"]["mode"]["max_tokens"] > 1000
    assert steps["streamed"]["same_bits"]


def test_what_a_cut_step_has_found_is_kept(run: Run) -> None:
    code, results = run("--only", "longest,streamed", "--seconds", "3")
    steps = results["steps"]
    assert code == 1
    assert {name: step["status"] for name, step in steps.items()} == {"longest": "cut", "streamed": "no time left"}
    assert steps["longest"]["memory"] == "64MiB"
