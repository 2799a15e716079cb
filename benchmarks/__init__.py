"""Speed against plain JAX, and against the peer where it is installed, as ratios."""
