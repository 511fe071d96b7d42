"""Early exit: what a layer shows of a row, what predicts its final answer, and how often such exits flip it."""
