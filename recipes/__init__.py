"""Recipes: how the sample data, the sample tokenizer and the sample models are made."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()  # as in the command: what other libraries log while they are imported helps nobody here
