"""Models and rows as for the command."""

from tests.score.conftest import _own_folder, model, reference  # noqa: F401 - fixtures
