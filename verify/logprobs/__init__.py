"""End to end: small models over the paged pools of a stack, whose log-probabilities must not change by a bit.

`tinymodels.py` are the models, `multiturn.py` serves conversations with them, `tampering.py` and `mamba_study.py` build
faults in and look for what they do to the numbers.
"""
