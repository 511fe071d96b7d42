"""What is asked about scored rows."""
