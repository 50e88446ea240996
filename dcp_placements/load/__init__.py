"""The load side: from a rank's state dict to the reads that fill it, and the proof that they do.

Imports ``bind``, ``storage`` and what is below them, never ``save``.
"""
