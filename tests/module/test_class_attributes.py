"""Layers and arrays in the body of a class without an annotation are warned of."""

import types
import warnings
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

LINEAR = eqx.nn.Linear(2, 2, key=jax.random.key(0))


def make(bases=(eqx.Module,), **body):
    return types.new_class("Net", bases, exec_body=lambda ns: ns.update(body))


@pytest.mark.parametrize(
    "value",
    [
        LINEAR,
        [LINEAR],
        {"a": (1, [LINEAR])},
        jnp.ones(2),
        jnp.arange(3),
        jax.random.key(0),
        (None, {"w": jnp.ones(2)}),
        eqx.nn.Sequential([eqx.nn.Lambda(jnp.tanh), LINEAR]),
        eqx.nn.Dropout(0.5),
        eqx.filter_vmap(LINEAR),
        eqx.Partial(jnp.add, jnp.ones(2)),
        eqx.nn.StateIndex(jnp.ones(2)),
    ],
)
def test_class_attribute_that_never_trains_is_warned_of(value):
    kind = type(value).__name__
    with pytest.warns(UserWarning) as caught:
        make(layers=value)
    (warning,) = caught
    text = str(warning.message)
    assert "Net.layers` holds " in text and "it is not a part of the tree" in text
    assert f"`layers: {kind}`" in text and f"ClassVar[{kind}]" in text


def test_the_warning_points_at_the_class():
    with pytest.warns(UserWarning) as caught:

        class Net(eqx.Module):
            layers = [LINEAR]  # noqa: RUF012

    assert caught[0].filename == __file__
    assert "Net.layers` holds a Linear" in str(caught[0].message)
    with pytest.raises(TypeError, match=r"it is a Net, a tree without leaves"):
        eqx.filter_grad(lambda net: net.layers[0](jnp.ones(2)).sum())(Net())


def test_what_is_not_lost_is_not_warned_of():
    class Abstract(eqx.Module):
        table: eqx.AbstractClassVar[jax.Array]
        declared: ClassVar[Any]

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class Net(Abstract):
            layer: eqx.nn.Linear
            default: Any = LINEAR
            constant: ClassVar[list] = [LINEAR, jnp.ones(2)]
            table = jnp.ones(2)
            declared = jnp.ones(2)
            host = np.ones(2), 1.0, "name", None
            activation = eqx.Partial(jax.nn.gelu, approximate=True)
            tanh = eqx.nn.Lambda(jnp.tanh)
            pool = eqx.nn.MaxPool1d(2)
            kinds = eqx.nn.Linear, jnp.float32
            fixed = staticmethod(eqx.filter_jit(lambda x: x))

            class Inner(eqx.Module):
                x: int

            class Kind(eqx.Enumeration):
                one = "one"

            @eqx.filter_jit
            def jitted(self):
                return self.layer

            @eqx.filter_jit(donate="all-except-first")
            def step(self):
                return self.layer

            @eqx.filter_custom_jvp
            def custom(x):
                return x

            @jax.jit
            def plain(self):
                return self

            @property
            def weight(self):
                return self.layer.weight

            @classmethod
            def build(cls):
                return cls(LINEAR)

        class Derived(Net):
            """Inherits all of it."""

        Derived.build()


def test_a_value_for_an_abstract_variable_without_annotation_is_warned_of():
    class Abstract(eqx.Module):
        layer: eqx.AbstractVar[eqx.nn.Linear]

    with pytest.warns(UserWarning, match="Net.layer` holds a Linear"):
        make(bases=(Abstract,), layer=LINEAR)
