"""`prefill bench`: methods compared on the same prompts."""
