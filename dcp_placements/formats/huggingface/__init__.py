"""Safetensors files, as Hugging Face has them: export and import.

Imports what ``formats`` may, and nothing of ``formats.megatron``.
"""
