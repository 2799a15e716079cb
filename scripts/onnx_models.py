#!/usr/bin/env python3
"""Converts some networks to ONNX, and compares onnxruntime with JAX. Run by `.ci/run`.

Needs `pip install "equinox_like[onnx]"`, which brings onnxruntime, too. With jax 0.12 or
newer, jax2onnx may refuse a network: then the error must say what to do.
"""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime

import equinox_like as eqx
from equinox_like import nn

KEY = jax.random.key(0)


def normal(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def cnn():
    keys = jax.random.split(KEY)
    return nn.Sequential(
        [
            nn.Conv2d(1, 4, 3, padding=1, key=keys[0]),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, 2),
            nn.Lambda(jnp.ravel),
            nn.Linear(64, 3, key=keys[1]),
        ]
    )


class SelfAttention(eqx.Module):
    attention: nn.MultiheadAttention
    norm: nn.LayerNorm

    def __call__(self, x):
        x = jax.vmap(self.norm)(x)
        return {"y": self.attention(x, x, x, is_causal=True)}


NETWORKS = {
    "MLP": (nn.MLP(4, 3, 8, 2, key=KEY), normal(4)),
    "MLP on a batch": (jax.vmap(nn.MLP(4, 3, 8, 2, key=KEY)), normal(5, 4)),
    "CNN": (cnn(), normal(1, 8, 8)),
    "attention": (
        SelfAttention(nn.MultiheadAttention(2, 8, key=KEY), nn.LayerNorm(8)),
        normal(5, 8),
    ),
    "GRU": (nn.RNN([nn.GRUCell(4, 4, key=KEY)]), normal(6, 4)),
}


def main():
    converted = []
    for name, (model, x) in NETWORKS.items():
        try:
            proto = eqx.to_onnx(model, x)
        except RuntimeError as error:
            assert jax.__version_info__ >= (0, 12), error
            assert "convert in an environment with `pip install 'jax<0.12'" in str(
                error
            )
            print(f"{name}: refused")
            continue
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        (given,) = session.get_inputs()
        outputs = session.run(None, {given.name: np.asarray(x)})
        expected = jax.tree.leaves(model(x))
        for output, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)
        names = [output.name for output in session.get_outputs()]
        print(f"{name}: {given.name} -> {', '.join(names)}")
        converted.append(name)
    assert converted, "jax2onnx converted nothing"


if __name__ == "__main__":
    main()
