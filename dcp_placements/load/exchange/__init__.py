"""``exchange=True``: the ranks of a replica set divide its reads, and send each other the rest."""
