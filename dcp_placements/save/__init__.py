"""The save side: from a rank's state dict to the items that it writes.

Imports ``bind``, ``storage`` and what is below them, never ``load``.
"""
