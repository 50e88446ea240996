"""Safetensors files in the form of the Hugging Face hub: export and import."""
