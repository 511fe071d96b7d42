"""Images in rows: what is in a file of them, and where they stand in a prompt."""
