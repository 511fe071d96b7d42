"""The Ray cluster to copy, and the job for it."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from prefillcli import cli
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings

RECIPES = Path(__file__).parents[3] / "recipes" / "ray"
TEXT = (RECIPES / "cluster.yaml").read_text()
CLUSTER: dict[str, Any] = yaml.safe_load(TEXT)


def test_the_job_fits_the_cluster() -> None:
    settings = load_settings(ScoreSettings, {}, recipe=str(RECIPES / "job.yaml"), environment={})
    assert (settings.processes.runner, settings.processes.ray_address) == ("ray", "auto")
    assert settings.processes.workers == CLUSTER["max_workers"] == len(CLUSTER["provider"]["worker_ips"])


def test_the_commands_of_the_cluster_are_valid() -> None:
    commands = re.findall(r"bin/prefill (score [^\"]+)\"", TEXT)
    assert commands
    for command in commands:
        name, *words = shlex.split(command)
        group: Any = typer.main.get_command(cli.app)
        given = group.commands[name].make_context(name, words).params
        flags = {key: value for key, value in given.items() if value not in (None, (), []) and key != "recipe"}
        assert given["recipe"] == "ray.yaml"
        assert load_settings(ScoreSettings, flags, recipe=str(RECIPES / "job.yaml"), environment={}).files.resume
    (copied,) = CLUSTER["head_setup_commands"]
    source, target = (Path(word) for word in shlex.split(copied)[1:])
    assert (RECIPES.parents[1] / source.relative_to("/srv/scoring")).is_file()
    assert target == Path("/srv/scoring/ray.yaml")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here; make test-ray brings its own")
@pytest.mark.filterwarnings("ignore")
def test_ray_takes_the_cluster_and_its_commands() -> None:
    from click.testing import CliRunner
    from ray.autoscaler._private.util import prepare_config, validate_config
    from ray.scripts import scripts

    validate_config(prepare_config(CLUSTER))
    known = CliRunner().invoke(scripts.start, ["--help"]).output
    starts = [
        line for name in ("head", "worker") for line in CLUSTER[f"{name}_start_ray_commands"] if " start " in line
    ]
    assert len(starts) == 2
    for line in starts:
        assert {word.split("=")[0] for word in shlex.split(line) if word.startswith("--")} <= set(
            re.findall(r"--[a-z-]+", known)
        )
