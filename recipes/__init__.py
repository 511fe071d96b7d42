"""Recipes: jobs to copy, and what runs them on a real model."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()  # as in the command: what other libraries log while they are imported helps nobody here
