"""Rows in: files, folders and URLs become batches of rows."""
