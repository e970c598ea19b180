"""Many processes, one checkpoint."""
