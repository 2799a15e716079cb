"""Layer 2: trees in files."""
