"""What the answers are worth."""
