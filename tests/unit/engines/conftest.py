"""Models and rows as for the command."""

from tests.jobs.conftest import _own_folder, model, reference  # noqa: F401 - fixtures
