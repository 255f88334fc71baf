"""The tests, a file for each module or claim."""
