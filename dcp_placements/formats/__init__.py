"""Other people's files as DCP checkpoints, and DCP checkpoints as other people's files.

Imports ``offline`` and what is below it.
"""
