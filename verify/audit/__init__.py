"""Dispatch audit: which path an engine's published rules take for a pool, and what that choice costs on this device.

`rules.py` has the rules, `costs.py` holds what they choose against what was measured.
"""
