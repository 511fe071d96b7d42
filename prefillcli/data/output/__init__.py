"""Rows out: parts, manifest, resume, and the output itself."""
