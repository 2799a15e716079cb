"""Models written for Equinox, after changing the import line alone.

Among them are the ideas of its twelve examples, in other words: `mnist`, `cnn`, `lstm`,
`frozen_layer`, `serialisation`, `init_apply`, `stateful`, `parallelism`, `unet`, `vit`,
`diffusion` and `gan`.
"""

import types
from pathlib import Path

import jax
import numpy as np
import pytest

MODELS = Path(__file__).parent / "peer_models"
THEIR_IMPORT, OUR_IMPORT = "import equinox as eqx\n", "import equinox_like as eqx\n"

# What Equinox 0.13.8 on jax 0.10.2 gives for `run(PRNGKey(0))`: losses of a few steps of
# training, with dropout and state, results and parameters. From `scripts/peer_models.py`.
# fmt: off
EXPECTED = {
    "cnn": [
        -0.208275, 0.14516, 0.248262, -0.216916, 0.055191, 0.138286, 2.195598,
        1.962186, 1.820314,
    ],
    "diffusion": [
        -30.710073, 42.007797, 112.969025, -44.283356, 0.997069, 0.949076,
        0.910062,
    ],
    "frozen_layer": [
        -0.152032, 1.0, 1.0, 0.0, 0.513007, 0.495254, 0.484235,
    ],
    "gan": [
        0.734354, 0.70133, 0.666784, -0.031635, 0.023935, -0.081474, -0.100789,
        1.449603, 1.33284, 1.242311,
    ],
    "init_apply": [
        1.42792, 1.137508, 0.998733, 0.964921, 0.079351,
    ],
    "mnist": [
        2.191488, 2.021089, 1.871846, 1.740925, 0.5,
    ],
    "parallelism": [
        3.094101, 2.981849, 2.862286, 1.0,
    ],
    "serialisation": [
        0.010237, 0.005095, 1.0, 3.0,
    ],
    "stateful": [
        3.99906, 3.659998, 3.355884, 3.093123, 0.018325, 0.020364, -0.009186,
        0.001591, 0.003585, 0.002077, 0.014109, 0.002205, 0.015248, 0.017153,
        0.009086, -0.208078, 0.338112, -0.624854, -0.027873, -0.117232, 0.684453,
        0.969511, -0.129184,
    ],
    "lstm": [
        0.700058, 0.684874, 0.673377, 0.45213, 0.446324, 0.44547, 0.451271,
        0.452541, 0.447463, -0.365994, -0.123271, 0.108757,
    ],
    "resnet": [
        -0.004462, -0.006545, -0.003326, 0.006632, -0.008188, 0.001902, 0.982951,
        0.984453, 0.982508, 0.982057, 0.981543, 0.981994, 0.995953, 1.002252,
        1.002137, 0.996161, 0.998918, 1.004581, 0.155981, -0.233664, -0.272196,
        -0.161812, 0.337398, -0.367001, 0.09645, 0.11664, 0.177216, 0.096617,
        0.077956, 0.069006, 0.08868, 1.000802, 1.00334, 1.004606, 1.000328,
        0.999059, 1.004251, 1.681192, 2.972607, 1.182802, 1.878774,
    ],
    "unet": [
        1.461736, 0.92266, 0.81528, 1.339234, 0.764303, -0.222282, -0.211007,
        -0.150114,
    ],
    "vit": [
        0.943972, 0.747684, 0.654789, 0.503379, -0.528216, -0.151155, -0.010855,
        -0.000751, 0.089117,
    ],
}
# fmt: on


@pytest.mark.parametrize("name", EXPECTED)
def test_model_trains_as_with_equinox(name) -> None:
    source = (MODELS / f"{name}.py").read_text()
    assert source.count(THEIR_IMPORT) == 1
    module = types.ModuleType(name)
    code = source.replace(THEIR_IMPORT, OUR_IMPORT)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    results = module.run(jax.random.PRNGKey(0))
    if isinstance(results, dict) and "losses" in results:
        losses = [float(loss) for loss in results["losses"]]
        assert losses == sorted(losses, reverse=True)
    leaves = jax.tree.leaves(results)
    values = np.concatenate([np.ravel(leaf) for leaf in leaves])
    np.testing.assert_allclose(values, EXPECTED[name], rtol=1e-4, atol=1e-5)


def test_every_model_is_run() -> None:
    assert {path.stem for path in MODELS.glob("*.py")} == set(EXPECTED)
