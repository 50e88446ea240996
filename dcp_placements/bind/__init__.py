"""State dict, rules and names bound together: the layout of every tensor on this rank.

Imports ``names`` and what is below it. The save side and the load side both start here.
"""
