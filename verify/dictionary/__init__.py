"""How other engines name and order the same bytes: a table of names, bijections to ours, and names that mislead.

`entries.py` is the table, `arrangement.py` moves bytes between any two of its entries and says which of our layouts an
entry equals, `twins.py` finds entries whose tensors have the same shape and other bytes.
"""
