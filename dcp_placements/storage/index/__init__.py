"""The index of a checkpoint's rows and keys, of which a rank reads the parts that it needs.

Imports what ``storage`` may.
"""
