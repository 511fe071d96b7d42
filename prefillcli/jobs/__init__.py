"""The commands that read rows, each from its options to its exit code."""
