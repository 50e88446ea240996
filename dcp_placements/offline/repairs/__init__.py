"""``doctor``, rescue and ``merge-metadata``: what can be repaired in a checkpoint."""
