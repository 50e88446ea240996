"""The pickle in ``.metadata``: which classes and fields it may have, and how its rows are written.

Imports what ``storage`` may.
"""
