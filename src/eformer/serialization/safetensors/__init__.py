"""The safetensors format: headers, files that are read, files that are written. Knows nothing of trees."""
