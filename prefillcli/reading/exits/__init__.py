"""Early exits: fewer layers, and cheaper models first."""
