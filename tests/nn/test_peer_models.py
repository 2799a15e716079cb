"""Models written for the peer differ by their import line alone."""

import types
from pathlib import Path

import jax
import numpy as np
import pytest

MODELS = Path(__file__).parent / "peer_models"
THEIR_IMPORT, OUR_IMPORT = "import equinox as eqx\n", "import equinox_like as eqx\n"

# What the peer (0.13.8 on jax 0.10.2) gives for `run(PRNGKey(0))`: losses of a few steps of
# training, with dropout and state, then results and parameters.
# fmt: off
EXPECTED = {
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
        1.22629, 0.878913, 0.761482, 1.187209, 1.044519, -0.447426, 0.187666,
        0.100985,
    ],
    "vit": [
        0.960256, 0.809218, 0.710159, 0.531851, -0.405378, -0.147882, -0.191064,
        0.349184, -0.168554,
    ],
}
# fmt: on


@pytest.mark.parametrize("name", EXPECTED)
def test_model_of_the_peer_trains_alike(name) -> None:
    source = (MODELS / f"{name}.py").read_text()
    assert source.count(THEIR_IMPORT) == 1
    module = types.ModuleType(name)
    code = source.replace(THEIR_IMPORT, OUR_IMPORT)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    leaves = jax.tree.leaves(module.run(jax.random.PRNGKey(0)))
    values = np.concatenate([np.ravel(leaf) for leaf in leaves])
    np.testing.assert_allclose(values, EXPECTED[name], rtol=1e-4, atol=1e-5)


def test_every_model_is_run() -> None:
    assert {path.stem for path in MODELS.glob("*.py")} == set(EXPECTED)
