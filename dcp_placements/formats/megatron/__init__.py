"""Megatron-LM's checkpoint directories: their layout and their import.

Imports what ``formats`` may, and nothing of ``formats.huggingface``.
"""
