"""Measurements against a plain transformers loop: `python -m prefillcli.bench`."""
