"""The repository's own benchmarks and experiments: the layer walk against a plain loop, padded batches and vLLM, and
what a real model shows on real reviews. Not in the wheel."""

from prefillcli.runtime.extras import quiet_imports

quiet_imports()  # as in the command: what other libraries log while they are imported helps nobody here
