"""The version of the package, as `pyproject.toml` has it, and those of others."""

from functools import cache

__version__ = "0.1.0"


@cache
def version_of(package: str) -> str:
    """Return the version of an installed package. Python parses all of its metadata for that, so it is done once.

    Raises PackageNotFoundError.
    """
    from importlib.metadata import version

    return version(package)
