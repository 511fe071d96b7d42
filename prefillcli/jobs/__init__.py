"""The commands that read rows: what each does from its options to its exit code."""
