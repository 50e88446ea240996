"""``diff``: what differs between two checkpoints, by content."""
