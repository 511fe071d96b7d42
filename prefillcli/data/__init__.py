"""Rows in, rows out: reading, templates and labels, parts, manifest and resume. Knows no torch."""
