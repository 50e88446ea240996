"""What a checkpoint stores beside its data: ``.metadata``, records of the save, and save ids.

Imports what ``storage`` may.
"""
