"""``rehearse``: whether a checkpoint loads into a topology, and at what cost."""
