"""The only place that imports unstable JAX. One file per matter, each with its reason."""
