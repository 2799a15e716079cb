"""Speed against plain JAX, and against Equinox where it is installed, as ratios."""
