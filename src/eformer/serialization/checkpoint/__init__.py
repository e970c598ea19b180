"""A checkpoint in one file or in several: saving, loading, reading parts."""
