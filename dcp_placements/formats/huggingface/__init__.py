"""Safetensors files in the form of the Hugging Face hub: export and import.

Imports what ``formats`` may, and nothing of ``formats.megatron``.
"""
