"""Trees as named tensors and JSON, and back. Knows nothing of files."""
