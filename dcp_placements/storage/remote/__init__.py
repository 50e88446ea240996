"""Checkpoints at a URL: single requests, and torch's interface of a file system over fsspec."""
