"""Who holds which boxes of which keys: what a rank has, what all ranks have, what they cover.

The page ``DESIGN.md`` is beside this file.
"""
