"""Readers of checkpoint metadata: DCP's, and the headers of safetensors files."""
