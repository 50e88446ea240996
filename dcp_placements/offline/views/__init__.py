"""``inspect`` and ``draw``: what a checkpoint holds, as data and as pictures."""
