"""Who holds which boxes of which keys: what a rank has, what all ranks have, what they cover.

The guide is ``README.md`` beside this file.
"""
