"""Layer 4: what acts while a program runs."""
