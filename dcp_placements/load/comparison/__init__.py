"""Is a load declared as its checkpoint was saved?

A wrong rename, a forgotten placement or the rows of another rank find every key and the right
shapes. So a load is compared with the record of the save.
"""
