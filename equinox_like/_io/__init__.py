"""Layer 2: saving trees to files, and loading them."""
