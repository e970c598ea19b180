"""Quantized arrays for JAX that behave like arrays everywhere. Importing this module touches no backend."""

__version__ = "0.1.0"
