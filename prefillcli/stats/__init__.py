"""What scores and counts say: label probabilities, how often answers flip, how sure that is."""
