"""Conversions of checkpoints: sources, assembly by a rename, a layout, two writers, one output."""
