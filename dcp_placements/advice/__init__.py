"""Proposed declarations: what shapes, names and contents of all ranks leave possible."""
