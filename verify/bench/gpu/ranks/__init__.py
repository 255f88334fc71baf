"""Ranks of one host at once, a GPU each: what one does to the other's transfers.

Every rank is a process, as in a server. `cases` says what is measured; `rank` is such a process, `meeting` lets them
wait for each other; `record` is what they write down, `report` what follows from it. On emulated devices the same runs
without a GPU: its figures mean nothing there.
"""
