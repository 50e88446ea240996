"""Loads whose ranks read once what several of them need, and send it to each other.

Stands beside the core, which imports it where ``exchange=`` is given, and knows a protocol alone
(``dcp_placements.load.arrival.Exchange``).
"""
