"""What other programs write: GGUF, bitsandbytes, Orbax, Flax."""
