"""Maximum input lengths, and a model of the seconds that a plan takes."""
