"""The coordinator's half of a save: the plans of all ranks, checked, compared and assigned.

Imports what ``save`` may. Local plans are integers and digests; no data of a
tensor is needed here.
"""
