"""Models and rows as for the command."""

from tests.jobs.conftest import _own_folder, draft, model, reference  # noqa: F401 - fixtures
