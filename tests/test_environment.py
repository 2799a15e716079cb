"""What the environment may say, and what it may not."""

import runpy

import pytest

from equinox_like import _environment

VARIABLES = [
    ("EQX_ON_ERROR", "ON_ERROR", "nan", "nan"),
    ("EQX_ON_ERROR", "ON_ERROR", "off", "off"),
    ("EQX_ON_ERROR", "ON_ERROR", None, "raise"),
    ("EQX_ON_ERROR_BREAKPOINT_FRAMES", "BREAKPOINT_FRAMES", "3", 3),
    ("EQX_ON_ERROR_BREAKPOINT_FRAMES", "BREAKPOINT_FRAMES", None, 1),
    ("EQX_GETKEY_SEED", "GETKEY_SEED", "3", 3),
    ("EQX_GETKEY_SEED", "GETKEY_SEED", None, None),
    ("EQX_REGISTRY", "REGISTRY", "public", "public"),
    ("EQX_REGISTRY", "REGISTRY", None, "own"),
    ("EQX_RETRACE_WARNING", "WARNS_OF_RETRACES", "off", False),
    ("EQX_RETRACE_WARNING", "WARNS_OF_RETRACES", None, True),
]


def values():
    return runpy.run_path(_environment.__file__, run_name="equinox_like._environment")


@pytest.mark.parametrize(("variable", "name", "text", "value"), VARIABLES)
def test_variables_are_read_when_the_library_is_imported(
    variable, name, text, value, monkeypatch
):
    monkeypatch.delenv(variable, raising=False)
    if text is not None:
        monkeypatch.setenv(variable, text)
    assert values()[name] == value


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("EQX_ON_ERROR", "", "one of raise, nan, breakpoint, off"),
        ("EQX_ON_ERROR", "Raise", "one of raise, nan, breakpoint, off"),
        ("EQX_ON_ERROR_BREAKPOINT_FRAMES", "x", "an integer"),
        ("EQX_GETKEY_SEED", "x", "an integer"),
        ("EQX_REGISTRY", "jax", "one of own, public"),
        ("EQX_RETRACE_WARNING", "0", "one of on, off"),
    ],
)
def test_other_values_are_an_error(variable, text, wanted, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} must be {wanted}; got {text!r}"):
        values()


def test_misspelt_value_is_answered_by_the_right_one(monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "Rase")
    with pytest.raises(ValueError, match=r"Did you mean 'raise'\?$"):
        values()


def test_breakpoint_mode_is_warned_of(monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "breakpoint")
    with pytest.warns(UserWarning, match="EQX_ON_ERROR=breakpoint opens a debugger"):
        assert values()["ON_ERROR"] == "breakpoint"
