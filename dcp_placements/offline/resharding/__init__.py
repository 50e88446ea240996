"""``reshard``: a checkpoint rewritten for the world that loads it."""
