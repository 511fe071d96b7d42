"""Statistics of scores and counts: label probabilities, rates of flipped answers, and their intervals."""
