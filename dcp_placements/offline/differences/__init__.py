"""``diff``: what differs between two checkpoints, by content.

Imports what ``offline`` may.
"""
