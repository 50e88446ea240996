"""``doctor``, rescue and ``merge-metadata``: what can be repaired in a checkpoint.

Imports what ``offline`` may.
"""
