"""The class of JAX's tracers.

Serves jax 0.10 to 0.12, where `jax.core.Tracer` is the only name for it. Needed because
not every tracer is a `jax.Array`: one that stands for a `jax.Ref` is not.
"""

from jax.core import Tracer as Tracer
