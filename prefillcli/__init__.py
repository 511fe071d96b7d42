"""Offline, prefill-only LLM scoring, layer by layer over a forest of prompts."""

__version__ = "0.1.0"
