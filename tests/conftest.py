"""How the tests run: on the CPU as four devices, with the library's annotations checked.

This file is read before anything imports JAX or the library.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jaxtyping

# Each function of the library checks its arguments against its annotations.
jaxtyping.install_import_hook("equinox_like", "beartype.beartype")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=60, derandomize=True
)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture
def without_type_checks(monkeypatch):
    """As users run it: a wrong type meets the function's own check, not its annotation."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
