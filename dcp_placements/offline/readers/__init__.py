"""Readers of what checkpoints say about themselves: DCP metadata, safetensors headers.

Imports what ``offline`` may.
"""
