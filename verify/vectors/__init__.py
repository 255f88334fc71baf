"""Golden vectors: cases with their right bytes, for implementations in any language (`data/vectors/README.md`)."""
