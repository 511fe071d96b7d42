"""The Ray cluster that a job's actors run on: joined or begun, and what of it each actor takes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from prefillcli.errors import ResourceError, UsageError, brief
from prefillcli.runtime.cores import allowed
from prefillcli.runtime.extras import require_extra

_STORE_BYTES = 256 << 20  # of a Ray of our own: tasks are some MB
_PATIENCE = 10.0  # seconds for an address to answer
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
"""Set before Ray is imported, unless the environment says otherwise."""


class RayCluster:
    """A cluster at an address, or a Ray of this machine's own, which ends with this process.

    `resources` are those that every worker asks for, by the names that users know; those not given are chosen.
    """

    def __init__(
        self, address: str | None, resources: Mapping[str, float], *, workers: int, device: str, quiet: bool
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        if self.address.startswith("ray://"):
            raise UsageError(
                f"--ray-address {self.address}: prefill is no Ray client\n"
                "run it on a machine of the cluster, with ray job submit for example, and take --ray-address auto"
            )
        self._workers = workers
        self._asked = dict(resources)
        self._device = device
        self._quiet = quiet
        self._joined = False
        self.ray: Any = None

    @property
    def own(self) -> bool:
        """Whether this Ray is begun for the job."""
        return self.address == "local"

    def join(self) -> None:
        """Join or begin it. Raises ResourceError, and UsageError without Ray.

        Called by a thread that is not the main one, it leaves Python's handlers of signals alone.
        """
        for name, value in {**_VARIABLES, **self._said()}.items():
            os.environ.setdefault(name, value)
        require_extra("ray", "--runner ray")
        try:
            import ray
        except ImportError as error:  # a package that Ray needs
            raise UsageError(f"--runner ray: Ray cannot be imported: {brief(error)}") from None
        if not ray.is_initialized():
            self._refuse_silence()
            try:
                ray.init(**self._arguments())
            except Exception as error:
                what = "Ray does not begin here" if self.own else f"--ray-address {self.address}: cannot be joined"
                raise ResourceError(f"{what}: {brief(error)}") from None
            self._joined = True
        self.ray = ray
        if self.own:
            self._refuse_what_never_fits()

    def leave(self) -> None:
        """Leave the cluster; the job's actors end. A Ray that this process had joined before stays."""
        if self._joined:
            import ray

            ray.shutdown()
            self._joined = False

    def options(self) -> dict[str, Any]:
        """What Ray sets aside for an actor, as Ray's options name it."""
        asked = self._choice()
        found: dict[str, Any] = {name: asked.pop(name) for name in ("num_cpus", "num_gpus") if name in asked}
        if "memory" in asked:
            found["memory"] = int(asked.pop("memory"))
        return {**found, "resources": asked} if asked else found

    def wish(self) -> str:
        """What a worker asks for, to be read."""
        return ", ".join(f"{name}={amount:g}" for name, amount in self._choice().items() if amount)

    def room(self) -> str:
        """What the machines of the cluster have, to be read."""
        have = self.ray.cluster_resources()
        shown = {name: have[name] for name in ("CPU", "GPU", *self._asked) if name in have}
        nodes = sum(bool(node["Alive"]) for node in self.ray.nodes())
        return f"{nodes} machines with {', '.join(f'{name} {amount:g}' for name, amount in shown.items())} in all"

    def _refuse_silence(self) -> None:
        """Ray itself waits for minutes where nothing answers."""
        host, colon, port = self.address.rpartition(":")
        if not colon or not port.isdigit():
            return  # auto, local
        try:
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
        except (OSError, OverflowError) as error:
            raise ResourceError(f"--ray-address {self.address}: cannot be joined: {brief(error)}") from None

    def _said(self) -> dict[str, str]:
        """What Ray says on stderr by itself: no colours in a file, little when asked to be quiet."""
        said = {} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}
        return {**said, "RAY_SCHEDULER_EVENTS": "0"} if self._quiet or self.own else said

    def _arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {"address": self.address, "log_to_driver": True, "logging_level": "ERROR"}
        if self.own:
            cores = max(allowed(), 0 if "num_cpus" in self._asked else self._workers)
            custom = {name: amount * self._workers for name, amount in self._asked.items() if name not in _KNOWN}
            found |= {"include_dashboard": False, "num_cpus": cores, "object_store_memory": _STORE_BYTES}
            found |= {"resources": custom} if custom else {}
        return found

    def _choice(self) -> dict[str, float]:
        """Amounts by name, those that were not asked for included."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        asked = dict(self._asked)
        if "num_gpus" not in asked and self._device != "cpu":
            some = any(node.get("GPU", 0) for node in nodes)
            asked["num_gpus"] = 1.0 if some or self._device == "cuda" else 0.0
        if "num_cpus" not in asked:
            asked["num_cpus"] = even_part(nodes, self._workers, asked.get("num_gpus", 0.0))
        return asked

    def _refuse_what_never_fits(self) -> None:
        have = self.ray.cluster_resources()
        for name, amount in self._choice().items():
            found = have.get({"num_cpus": "CPU", "num_gpus": "GPU"}.get(name, name), 0.0)
            if amount * self._workers > found:
                raise ResourceError(
                    f"--worker-resources {name}={amount:g}: {self._workers} workers ask for more than the "
                    f"{found:g} of this machine\ntake fewer --workers, or less for each"
                )


_KNOWN = frozenset({"num_cpus", "num_gpus", "memory"})


def even_part(nodes: Sequence[Mapping[str, float]], workers: int, gpus: float = 0.0) -> float:
    """The most CPUs, whole ones, of which every worker can have as many, on machines with these resources; 1 if they
    have no room for all workers. Each worker takes `gpus` as well."""
    for cpus in range(int(max((node.get("CPU", 0.0) for node in nodes), default=0)), 0, -1):
        places = 0
        for node in nodes:
            here = int(node.get("CPU", 0.0) // cpus)
            places += min(here, int(node.get("GPU", 0.0) // gpus)) if gpus else here
        if places >= workers:
            return float(cpus)
    return 1.0
