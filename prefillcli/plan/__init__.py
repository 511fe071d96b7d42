"""Order and packing: from the prompts of a window to the packs that the engine walks."""
