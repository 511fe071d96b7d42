"""Proof that a file has not changed: versions, digests, seals."""
