"""The process itself: clock, memory, threads, signals, streams, progress."""
