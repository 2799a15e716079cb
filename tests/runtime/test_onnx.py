"""`to_onnx`, with a stand-in for the converter: `scripts/onnx_models.py` takes jax2onnx."""

import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import internal as eqxi

X = jnp.asarray([1.0, 2.0])


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """What the converter was given."""
    found = {}

    def convert(fn, inputs, **options):
        found.update(options, fn=fn, inputs=inputs)
        found["jaxpr"] = str(jax.make_jaxpr(fn)(*inputs))
        return "a model"

    module = types.ModuleType("jax2onnx")
    module.to_onnx = convert  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jax2onnx", module)
    return found


def test_arrays_are_inputs_with_the_names_of_the_parameters(given):
    def fun(batch, scale, *rest):
        total = scale * batch["a"] + rest[0][1]
        return {"total": total, "none": None, "static": "text"}, batch["a"]

    struct = jax.ShapeDtypeStruct((2,), "float32")
    made = eqx.to_onnx(fun, {"a": X, "b": 1}, 2.0, (struct, X), opset=21)
    assert made == "a model" and given["opset"] == 21
    assert given["input_names"] == ["batch['a']", "rest[0][0]", "rest[0][1]"]
    assert given["inputs"] == [struct] * 3
    assert given["output_names"] == ["output[0]['total']", "output[1]"]
    total, same = given["fn"](X, 0 * X, 3 * X)
    assert total.tolist() == [5, 10] and same.tolist() == [1, 2]


def test_arrays_of_a_model_are_no_inputs(given):
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    eqxi.to_onnx(model)(X)
    assert given["input_names"] == ["x"] and given["output_names"] == ["output"]
    assert jnp.allclose(given["fn"](X)[0], model(X))


def test_primitives_of_the_library_are_replaced(given):
    eqx.to_onnx(lambda x: eqxi.nondifferentiable(eqxi.noinline(jnp.sin)(x)), X)
    assert "sin" in given["jaxpr"]
    assert "noinline" not in given["jaxpr"] and "nondiff" not in given["jaxpr"]


def test_function_without_arrays_is_an_error():
    for call, where in (
        (lambda: eqx.to_onnx(lambda n: jnp.ones(n), 2), "the arguments"),
        (lambda: eqx.to_onnx(lambda x: None, X), "the output"),
    ):
        with pytest.raises(ValueError, match=f"no array in {where}"):
            call()
    with pytest.raises(TypeError, match="to_onnx"):
        eqx.to_onnx(3, X)  # pyright: ignore[reportArgumentType]


def test_error_of_the_converter_names_the_function(monkeypatch):
    def refuse(*args, **options):
        raise AttributeError("module 'jax._src.core' has no attribute 'ClosedJaxpr'")

    monkeypatch.setattr(sys.modules["jax2onnx"], "to_onnx", refuse)
    said = f"cannot convert `MLP` with jax {jax.__version__}: AttributeError: module"
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    with pytest.raises(RuntimeError, match=re.escape(said)) as error:
        eqx.to_onnx(model, X)
    fix = "convert in an environment with `pip install 'jax<0.12' jax2onnx`"
    assert (fix in str(error.value)) == (jax.__version_info__ >= (0, 12))


def test_converter_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(ModuleNotFoundError, match="`pip install jax2onnx`"):
        eqx.to_onnx(jnp.sin, X)
