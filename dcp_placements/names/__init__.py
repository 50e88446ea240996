"""This rank's keys and the checkpoint's keys, and which parameter a state belongs to.

Imports ``rules`` and what is below it.
"""
