"""Ahead of time: lowering, compiling, and calling what was compiled."""

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx


@eqx.filter_jit
def scaled(tree, by, *, name="first"):
    return {k: v * by for k, v in tree.items()}, name


TREE = {"x": jnp.ones(3)}


def test_compiled_function_returns_what_the_function_does():
    compiled = scaled.lower(TREE, 2, name="n").compile()
    out, name = compiled(TREE, 2, name="n")
    assert out["x"].tolist() == [2, 2, 2] and name == "n"
    assert compiled(name="n", by=2, tree=TREE)[1] == "n"


def test_stages_tell_of_themselves():
    lowered = scaled.lower(TREE, 2.0)
    assert "stablehlo" in lowered.as_text() and "flops" in lowered.cost_analysis()
    compiled = lowered.compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 12
    assert "flops" in compiled.cost_analysis() and "HloModule" in compiled.as_text()
    assert "scaled" in repr(lowered) and "scaled" in repr(compiled)


def test_shapes_may_stand_for_arrays():
    shapes = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    compiled = scaled.lower(shapes, 2).compile()
    assert compiled(TREE, 2)[0]["x"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("by", [3, 2.0, jnp.asarray(2)], ids=repr)
def test_other_static_argument_is_refused_by_name(by):
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError, match="`by`"):
        compiled(TREE, by)


def test_other_static_argument_shows_both_values():
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError, match="`by` was the static 2, and is now True"):
        compiled(TREE, True)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"y": jnp.ones(3)}, r"`tree` was a dict with the keys \['x'\], and is now a"),
        ({"x": [jnp.ones(3)]}, r"`tree\['x'\]` was an array, and is now a list of"),
        ({"x": None}, r"`tree\['x'\]` was an array, and is now None"),
    ],
    ids=["key", "list", "None"],
)
def test_other_structure_is_refused(tree, message):
    with pytest.raises(TypeError, match=message):
        scaled.lower(TREE, 2).compile()(tree, 2)


def test_other_shape_is_refused():
    with pytest.raises(TypeError, match=r"float32\[4\]"):
        scaled.lower(TREE, 2).compile()({"x": jnp.ones(4)}, 2)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="missing"):
        scaled.lower(TREE, 2).compile()(TREE)


def test_compiled_function_cannot_be_transformed():
    compiled = scaled.lower(TREE, 2).compile()
    with pytest.raises(TypeError):
        jax.jit(lambda t: compiled(t, 2))(TREE)


def test_call_after_lowering_does_not_trace_again():
    traces = []

    @eqx.filter_jit
    def f(x):
        traces.append(1)
        return x

    f.lower(jnp.ones(2)).compile()
    f(jnp.ones(2))
    assert traces == [1]
