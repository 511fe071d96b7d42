"""The repository's own benchmarks: the layer walk against a plain loop, padded batches and vLLM. Not in the wheel."""
