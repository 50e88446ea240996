"""The formats of checkpoints, one class each, and how their files are read."""
