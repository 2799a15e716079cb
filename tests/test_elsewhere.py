"""Names of other libraries are answered with what to write here, which exists."""

import functools
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import equinox_like as eqx
from equinox_like import _public, nn

ROOT = Path(__file__).parents[1]
# What the expressions of the answers are evaluated with.
SCOPE = {
    "functools": functools,
    "jax": jax,
    "jnp": jnp,
    "optax": optax,
    "eqx": eqx,
    "nn": nn,
    "key": jax.random.key(0),
}
# Names of the other libraries, and a part of the answer.
ANSWERS = {
    "nn.ReLU": "`jax.nn.relu`",
    "nn.LeakyReLU": "`jax.nn.leaky_relu`",
    "nn.Hardswish": "`jax.nn.hard_swish`",
    "nn.LogSoftmax": "`jax.nn.log_softmax`",
    "nn.GELU": "`functools.partial(jax.nn.gelu, approximate=False)`",
    "nn.gelu": "`jax.nn.gelu`",
    "nn.tanh": "`jax.nn.tanh`",
    "nn.initializers": "`jax.nn.initializers`",
    "nn.Softshrink": "`jnp.where`",
    "nn.ModuleList": "a list",
    "nn.ModuleDict": "a dictionary",
    "nn.Module": "`eqx.Module`",
    "nn.Parameter": "a field with a floating-point array",
    "nn.Buffer": "`eqx.field(trainable=False)`",
    "nn.CrossEntropyLoss": "`optax.softmax_cross_entropy_with_integer_labels`",
    "nn.BCEWithLogitsLoss": "`optax.sigmoid_binary_cross_entropy`",
    "nn.MSELoss": "`optax.squared_error`",
    "nn.CTCLoss": "a function of Optax",
    "nn.LSTM": "`nn.RNN.build(nn.LSTMCell, 2, 3, key=key)`",
    "nn.RNNCell": "`nn.RNN` with a cell of your own",
    "nn.BatchNorm2d": "`nn.BatchNorm(3)`, with a state",
    "nn.InstanceNorm1d": "`nn.InstanceNorm(3)`",
    "nn.Dropout2d": "`broadcast_axes=`",
    "nn.Flatten": "`jnp.ravel`",
    "nn.PixelShuffle": "`jnp.reshape`",
    "nn.ReflectionPad2d": "`jnp.pad`",
    "nn.UpsamplingNearest2d": "`nn.Upsample(2)`",
    "nn.TransformerEncoderLayer": "`nn.MultiheadAttention`",
    "nn.MultiHeadDotProductAttention": "`nn.MultiheadAttention(2, 8, key=key)`",
    "nn.functional": "`jax.nn`",
    "nn.init": "`weight_init=`",
    "nn.utils": "`nn.WeightNorm`",
    "nn.DataParallel": "`eqx.filter_shard`",
    "nn.Dense": "`nn.Linear(2, 3, key=key)`",
    "nn.Conv2D": "`nn.Conv2d`",
    "nn.linear": "`nn.Linear`",
    "nn.Embed": "`nn.Embedding(10, 3, key=key)`",
    "nn.compact": "`__init__`",
    "nn.jit": "`eqx.filter_jit`",
    "nn.scan": "`eqx.filter_scan`",
    "nn.remat": "`eqx.filter_checkpoint`",
    "eqx.Linear": "`nn.Linear`",
    "eqx.ReLU": "`jax.nn.relu`",
    "eqx.Parameter": "a field",
    "eqx.make_with_state": "`nn.make_with_state`",
    "eqx.numpy": "`jax.numpy`",
    "eqx.Array": "`jax.Array`",
    "eqx.associative_scan": "`jax.lax.associative_scan`",
    "eqx.tree_map": "`jax.tree.map`",
    "eqx.make_sharded": "`eqx.Layout.init`",
    "eqx.shardings": "`eqx.Layout.shardings`",
    "eqx.optim": "`optax`",
}
TRANSFORMATIONS = (
    *("jit", "grad", "value_and_grad", "vmap", "pmap", "jvp", "vjp", "linearize"),
    *("jacfwd", "jacrev", "hessian", "checkpoint", "custom_jvp", "custom_vjp", "scan"),
    *("map", "cond", "switch", "while_loop", "fori_loop", "eval_shape", "make_jaxpr"),
    *("closure_convert", "pure_callback", "io_callback", "device_put", "shard_map"),
)
ANSWERS |= {f"eqx.{name}": f"`eqx.filter_{name}`" for name in TRANSFORMATIONS}


@pytest.mark.parametrize("name", ANSWERS)
def test_name_is_answered(name):
    module, _, attribute = name.partition(".")
    with pytest.raises(AttributeError) as caught:
        eval(name, SCOPE)
    shown = traceback.format_exception_only(caught.value)
    assert shown[0].startswith("AttributeError: module 'equinox_like")
    assert f"has no attribute {attribute!r}. Use " in shown[0]
    assert ANSWERS[name] in shown[0]
    assert "Did you mean" not in "".join(shown)  # Python's own would be another name
    assert not hasattr(SCOPE[module], attribute)
    assert attribute not in dir(SCOPE[module])


def expressions():
    answers = [*_public.TABLE.values(), *map(_public.find, TRANSFORMATIONS)]
    found = {code for answer in answers for code in re.findall("`(.*?)`", answer)}
    # Keywords of several layers, and a method.
    return sorted(found - {"weight_init=", "broadcast_axes=", "__init__"})


@pytest.mark.parametrize("code", expressions())
def test_answers_can_be_evaluated(code):
    assert eval(code, SCOPE) is not None


def test_keywords_of_answers_exist():
    nn.Linear(2, 3, weight_init="zeros", key=SCOPE["key"])
    nn.Dropout(0.5, broadcast_axes=(1, 2))


def test_no_row_hides_a_name_of_ours_or_is_hidden_by_another():
    rows = [names.split() for names in _public.TABLE]
    ours = {*dir(nn), *dir(eqx)}
    for i, names in enumerate(rows):
        for name in names:
            assert name not in ours
            example = name.replace("*", "X").replace("?", "1")
            assert _public.find(example) == [*_public.TABLE.values()][i], name


@pytest.mark.parametrize("name", ["nn.ReLU", "eqx.jit"])
def test_import_of_a_name_is_answered(name):
    module, _, attribute = name.partition(".")
    with pytest.raises(ImportError) as caught:
        exec(f"from {SCOPE[module].__name__} import {attribute}")
    assert ANSWERS[name] in str(caught.value)
    assert f"cannot import name {attribute!r} from" in str(caught.value)
    shown = "".join(traceback.format_exception_only(caught.value))
    assert "Did you mean" not in shown


@pytest.mark.parametrize("module", [eqx, nn])
def test_other_names_are_left_to_python(module):
    with pytest.raises(AttributeError) as caught:
        _ = module.no_such_name
    assert (
        str(caught.value)
        == f"module {module.__name__!r} has no attribute 'no_such_name'"
    )
    assert caught.value.name == "no_such_name" and caught.value.obj is module
    assert not hasattr(module, "_relu") and not hasattr(module, "__wrapped__")
    with pytest.raises(
        ImportError, match=r"^cannot import name 'no_such_name' from .*\("
    ):
        exec(f"from {module.__name__} import no_such_name")


def test_page_shows_the_table():
    run = [sys.executable, str(ROOT / "docs" / "scripts" / "names_table.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    rows = done.stdout.splitlines()
    assert len(rows) > len(_public.TABLE)
    assert done.stdout in (ROOT / "docs" / "coming-from-pytorch.md").read_text()
