"""How a whole tensor is cut, whether boxes cover it, and which bytes a box is: integers only.

Imports nothing of the package, and neither torch nor numpy.
"""
