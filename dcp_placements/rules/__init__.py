"""What a user declares: meshes, placements, and the patterns that give each key its placement.

Imports ``layout`` and ``errors``; torch is not needed.
"""
