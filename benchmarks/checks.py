"""The cost of `error_if` in a train step if it does not raise; ours and Equinox's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import equinox_like as eqx

from ._measure import compare, show
from ._models import peer

OPTIMISER = optax.adam(1e-3)


def make_step(library: Any, check: str) -> Any:
    """A train step of an MLP that checks nothing, the loss, or also each gradient."""

    def loss_of(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def checked(x: jax.Array) -> jax.Array:
        return library.error_if(x, ~jnp.isfinite(x).all(), "not finite")

    def step(model: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
        if check != "none":
            loss = checked(loss)
        if check == "gradients":
            grads = jax.tree.map(checked, grads)
        updates, opt_state = OPTIMISER.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return eqx.filter_jit(step)


def run(rounds: int) -> None:
    rows = []
    for width, batch in (64, 64), (256, 256), (512, 512):
        contenders = {}
        for name, library, check in (
            ("no check", eqx, "none"),
            ("the loss", eqx, "loss"),
            ("loss and gradients", eqx, "gradients"),
            ("Equinox, the loss", peer, "loss"),
            ("Equinox, loss and gradients", peer, "gradients"),
        ):
            if library is not None:
                contenders[name] = partial(
                    _call, *_carried(library, check, width, batch)
                )
        name = f"width {width}, batch of {batch}"
        rows.append(compare(name, contenders, rounds=rounds))
    show("A train step that checks that values are finite", rows)


def _carried(library: Any, check: str, width: int, batch: int) -> tuple[Any, list, Any]:
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.MLP(width, width, width, 3, key=keys[0])
    opt_state = OPTIMISER.init(eqx.filter(model, eqx.trainable))
    x = jax.random.normal(keys[1], (batch, width))
    return make_step(library, check), [model, opt_state], x


def _call(step: Any, carry: list, x: jax.Array) -> jax.Array:
    """One step. Waits for its end, since a call with a check always does that."""
    carry[0], carry[1], loss = step(*carry, x, x)
    return jax.block_until_ready(loss)
