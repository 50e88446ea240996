"""One module per command of the command line.

Each reads arguments, calls ``offline`` or ``formats``, and prints what that returns.
"""
