"""Which rank of one world sends which box to which rank of another: integers only, no transport.

Imports nothing on its own, so that ``dcp_placements.transfer_plan`` costs nothing until it is used.
"""
