"""Rows in, rows out, and proof that files have not changed."""
