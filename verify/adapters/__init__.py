"""Other implementations against the golden vectors: `python -m verify adapter my_module:MyAdapter`."""
