"""Megatron-LM's checkpoint directories: which ranks wrote what, and their import.

Imports what ``formats`` may, and nothing of ``formats.huggingface``.
"""
