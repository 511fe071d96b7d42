"""Proof that a file is what it was: versions, digests, seals."""
