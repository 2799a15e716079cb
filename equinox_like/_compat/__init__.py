"""The only folder that imports unstable JAX. Each file says what it is needed for."""
