"""What fits and how fast: maximum input lengths, and a model of the seconds that a plan takes."""
