"""docs/faq.md quotes what JAX says today."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import equinox_like as eqx

TEXT = (Path(__file__).parents[1] / "docs" / "faq.md").read_text()

model = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))
x = jnp.ones(2)


def loss(model, x):
    return model(x).sum()


def scan():
    return jax.lax.scan(lambda carry, x: (carry, carry(x)), model, x[None])


def cond():
    return jax.lax.cond(True, lambda: model, lambda: model)


def apply_updates():
    return optax.apply_updates(model, eqx.filter(model, eqx.is_inexact_array))


# What fails under each heading, in the order of the quotations.
CALLS = {
    "`jax.jit(model)(x)`": [
        lambda: jax.jit(model)(x),
        lambda: jax.jit(loss, static_argnums=0)(model, x),
    ],
    "`jax.jit(loss)(model, x)`": [lambda: jax.jit(loss)(model, x)],
    "`jax.jit(lambda: model)()`": [lambda: jax.jit(lambda: model)()],
    "`jax.grad(loss)(model, x)`": [lambda: jax.grad(loss)(model, x)],
    "`jax.vmap(loss)(model, x)`": [lambda: jax.vmap(loss)(model, x)],
    "`jax.lax.scan` with a model as the carry": [scan],
    "`jax.lax.cond` that returns a model": [cond],
    "`jax.checkpoint(loss)(model, x)`": [lambda: jax.checkpoint(loss)(model, x)],
    "`optimiser.init(model)`": [lambda: optax.adamw(1e-3).init(model)],
    "`optax.apply_updates(model, updates)`": [apply_updates],
    "`jax.tree.map(lambda p: 0.9 * p, model)`": [
        lambda: jax.tree.map(lambda p: 0.9 * p, model)
    ],
    "`jnp.add(model, 1)`": [lambda: jnp.add(model, 1)],
    "`x + model`": [lambda: x + model],
}


def quotations():
    for section in TEXT.split("\n### ")[1:]:
        heading, _, body = section.partition("\n")
        body = body.partition("\n## ")[0]
        yield heading, re.findall(r"^```text\n(.*?)\n```$", body, re.DOTALL | re.M)


def test_every_quotation_is_checked():
    assert {h: len(q) for h, q in quotations()} == {h: len(c) for h, c in CALLS.items()}


@pytest.mark.parametrize("heading", CALLS)
def test_jax_says_what_is_quoted(heading):
    quoted = dict(quotations())[heading]
    for quotation, call in zip(quoted, CALLS[heading], strict=True):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        said = f"{caught.type.__name__}: {caught.value}"
        pattern = re.escape(quotation).replace(re.escape("..."), ".*")
        assert re.match(pattern, said, re.DOTALL), f"{said!r} is not {quotation!r}"


def test_errors_that_are_said_to_be_the_same_are():
    quoted = dict(quotations())
    for heading, call in (
        ("`jax.jit(loss)(model, x)`", lambda: jax.eval_shape(loss, model, x)),
        ("`jax.jit(loss)(model, x)`", lambda: jax.make_jaxpr(loss)(model, x)),
        ("`jax.checkpoint(loss)(model, x)`", lambda: jax.device_put(model)),
    ):
        pattern = re.escape(quoted[heading][0]).replace(re.escape("..."), ".*")
        with pytest.raises(TypeError) as caught:
            call()
        assert re.match(pattern, f"TypeError: {caught.value}", re.DOTALL)
    with pytest.raises(TypeError, match="stack requires ndarray or scalar arguments"):
        jnp.stack([model, model])
    with pytest.raises(ValueError, match=r"leaf `layers\[0\]\.weight`.*`filter_jit`"):
        jax.jit(loss, static_argnums=0)(model, x)
