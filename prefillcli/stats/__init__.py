"""What scores and counts say: how often answers flip, how sure that is, how many operations a prefill takes."""
