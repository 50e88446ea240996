"""Megatron-LM's checkpoint directories: their layout and their import."""
