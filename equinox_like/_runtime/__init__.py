"""Layer 4: features that act while a compiled program runs."""
