"""The list of JAX's faults under its flags is true, and names tests that there are."""

import ast
from pathlib import Path

import jax_flags
import pytest

TESTS = Path(__file__).parent
REPRODUCTIONS = {
    fault.reproduce.__name__: (flag, fault.reproduce)
    for flag, faults in jax_flags.FAULTS.items()
    for fault in faults
}


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_fault_is_one_of_jax_under_its_flag_alone(name):
    flag, reproduce = REPRODUCTIONS[name]
    if flag in jax_flags.flags_that_are_set():
        with pytest.raises(Exception):  # noqa: B017
            reproduce()
    else:
        reproduce()


@pytest.mark.parametrize(
    "name",
    [
        test
        for faults in jax_flags.FAULTS.values()
        for fault in faults
        for test in fault.tests
    ],
)
def test_what_is_listed_is_a_test(name):
    file, *scopes = name.split("[")[0].split("::")
    assert any(Path(file).is_relative_to(path) for path in jax_flags.PATHS)
    body = ast.parse((TESTS / file).read_text()).body
    for scope in scopes:
        found = [node for node in body if getattr(node, "name", None) == scope]
        assert len(found) == 1
        body = found[0].body
