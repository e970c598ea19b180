"""From one checkpoint to another, a tensor at a time, in spite of being killed."""
