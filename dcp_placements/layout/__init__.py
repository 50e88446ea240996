"""How a whole tensor is cut, and whether boxes cover it: integers only.

Imports nothing of the package but its errors, and no torch.
"""
