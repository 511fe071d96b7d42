"""What is asked of a row."""
