"""The files of a checkpoint: the writer, the reader, and ``metadata`` on what is where.

Imports ``layout`` and the modules of the package's root, never ``save`` nor ``load``.
"""
