"""Speed compared with plain JAX, and with Equinox if it is installed, as ratios."""
