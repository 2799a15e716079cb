"""`GetKey`: the keys that it gives, and how they come again."""

import os
import subprocess
import sys

import jax

from equinox_like.internal import GetKey


def test_calls_give_the_documented_keys():
    getkey = GetKey(seed=3)
    for k in (1, 2, 3):
        expected = jax.random.fold_in(jax.random.PRNGKey(3), k)
        assert (getkey() == expected).all()
    assert getkey.seed == 3 and getkey.call == 3


def test_seed_is_random_unless_it_is_given():
    first, second = GetKey(), GetKey()
    assert first.seed != second.seed
    assert (GetKey(first.seed)() == first()).all()


def test_it_shows_how_the_keys_come_again():
    getkey = GetKey(seed=3)
    getkey()
    assert repr(getkey) == f"GetKey(seed=3, call=1, key={getkey.key!r})"


def test_it_is_equal_to_itself_alone():
    getkey = GetKey(seed=3)
    assert getkey == getkey and getkey != GetKey(seed=3)
    assert len({getkey, GetKey(seed=3)}) == 2


def test_environment_has_the_seed():
    code = "import equinox_like as eqx; print(eqx.internal.GetKey().seed)"
    env = os.environ | {"EQX_GETKEY_SEED": "17"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert done.stdout == "17\n", done.stderr
