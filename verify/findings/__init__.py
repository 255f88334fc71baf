"""What was found in other projects' tests and dispatch, each reproduced here: `python -m verify findings`.

A finding is a claim that others can check: a function that works it out again, from the upstream file it names or from
committed measurements, and says whether the claim holds. FINDINGS.md is written from them. They are offered to these
projects, whose code taught this one most of what it knows.
"""
