"""`GetKey`: a fresh PRNG key at each call, for tests."""

import random

import jax

from .._environment import GETKEY_SEED


class GetKey:
    """Returns a new PRNG key each time it is called. Meant for tests.

    Print it if a test fails: its `repr` has the seed, which reproduces the same keys.

    **Arguments:**

    - `seed`: an integer. The default is the environment variable `EQX_GETKEY_SEED`, as
        it was when the library was imported. If that is not set, the seed is random.

    **Returns:**

    A callable without arguments. Its k-th call returns
    `jax.random.fold_in(jax.random.PRNGKey(seed), k)`, a raw `uint32` key.

    **Attributes:**

    - `seed`: the seed that is used.
    - `call`: the number of calls so far.
    - `key`: `jax.random.PRNGKey(seed)`.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        getkey = eqx.internal.GetKey(seed=0)
        x, y = jax.random.normal(getkey()), jax.random.normal(getkey())
        assert x != y and getkey.call == 2
        ```
    """

    def __init__(self, seed: int | None = None):
        if seed is None:
            seed = GETKEY_SEED
        self.seed = random.SystemRandom().getrandbits(31) if seed is None else seed
        self.call = 0
        self.key = jax.random.PRNGKey(self.seed)

    def __call__(self) -> jax.Array:
        self.call += 1
        return jax.random.fold_in(self.key, self.call)

    def __repr__(self) -> str:
        return f"GetKey(seed={self.seed}, call={self.call}, key={self.key!r})"
