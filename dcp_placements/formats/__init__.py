"""Files of other tools, imported as DCP checkpoints and exported from them.

Imports ``offline`` and what is below it.
"""
