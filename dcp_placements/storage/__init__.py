"""The files of a checkpoint: the writer, the reader, and ``.metadata``.

The folder imports ``layout`` and the modules of the package's root, never ``save`` or ``load``.
"""
