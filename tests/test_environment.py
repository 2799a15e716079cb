"""What the environment may say, and what it may not."""

import pytest

from equinox_like import _environment


@pytest.mark.parametrize("mode", ["raise", "nan", "off"])
def test_modes_are_taken(mode):
    assert _environment.read_mode(mode) == mode


def test_breakpoint_mode_is_warned_of():
    with pytest.warns(UserWarning, match="EQX_ON_ERROR=breakpoint opens a debugger"):
        assert _environment.read_mode("breakpoint") == "breakpoint"


@pytest.mark.parametrize("mode", ["", "Raise", "foo"])
def test_unknown_mode_is_an_error(mode):
    with pytest.raises(
        ValueError, match=f"EQX_ON_ERROR must be one of .* got {mode!r}"
    ):
        _environment.read_mode(mode)


def test_number_of_frames_is_an_integer():
    assert _environment.read_frames("3") == 3
    with pytest.raises(ValueError, match=r"EQX_ON_ERROR_BREAKPOINT_FRAMES.* got 'x'"):
        _environment.read_frames("x")


def test_registry_is_own_or_public():
    assert _environment.read_registry("public") == "public"
    with pytest.raises(
        ValueError, match="EQX_REGISTRY must be own or public; got 'jax'"
    ):
        _environment.read_registry("jax")


def test_seed_is_an_integer_if_it_is_given():
    assert _environment.read_seed(None) is None
    assert _environment.read_seed("3") == 3
    with pytest.raises(
        ValueError, match=r"EQX_GETKEY_SEED must be an integer; got 'x'"
    ):
        _environment.read_seed("x")


def test_retrace_warning_is_on_or_off():
    assert _environment.read_retrace_warning("on")
    assert not _environment.read_retrace_warning("off")
    with pytest.raises(
        ValueError, match="EQX_RETRACE_WARNING must be on or off; got '0'"
    ):
        _environment.read_retrace_warning("0")
