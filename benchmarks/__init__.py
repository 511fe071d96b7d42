"""The repository's own benchmarks: the layer walk against a plain loop, padded batches and vLLM. Not in the wheel."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()  # as in the command: what other libraries log while they are imported helps nobody here
