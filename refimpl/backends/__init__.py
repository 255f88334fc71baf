"""Backends: whatever executes a transfer plan. `registry` knows them by name."""
