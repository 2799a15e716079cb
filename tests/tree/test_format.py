import collections
import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import wadler_lindig as wl
from hypothesis import assume, given
from strategies import numbers, trees

import equinox_like as eqx


@dataclasses.dataclass
class Point:
    x: object
    y: object = 3
    hidden: object = dataclasses.field(default=0, repr=False)


class Affine(eqx.Module):
    weight: object
    bias: object = None
    name: object = eqx.field(static=True, default="affine")


def f(x):
    return x


# Laws


@given(trees())
def test_wide_text_is_one_line_and_narrow_text_says_the_same(tree):
    wide = eqx.tree_pformat(tree, width=10_000)
    assert "\n" not in wide
    narrow = eqx.tree_pformat(tree, width=1)
    assert "".join(narrow.split()) == "".join(wide.split())


@given(trees())
def test_text_fits_the_width_unless_it_cannot_be_broken(tree):
    # `wadler_lindig` does not count the comma after an item.
    lines = [x.removesuffix(",") for x in eqx.tree_pformat(tree, width=80).split("\n")]
    longest = max(map(len, eqx.tree_pformat(tree, width=1).split("\n")))
    assert max(map(len, lines)) <= max(80, longest)


@given(trees(leaves=st.one_of(numbers, st.sampled_from(["text", b"bytes"]))))
def test_containers_print_as_in_python(tree):
    assume("Node(" not in repr(tree))
    assert eqx.tree_pformat(tree, width=10_000) == repr(tree)


# Leaves


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (lambda: jnp.ones((2, 3)), "f32[2,3]"),
        (lambda: jnp.asarray(1, jnp.int32), "i32[]"),
        (lambda: jnp.asarray(1.0), "weak_f32[]"),
        (lambda: jnp.ones(4, bool), "bool[4]"),
        (lambda: jnp.ones(2, jnp.bfloat16), "bf16[2]"),
        (lambda: jnp.ones(2, jnp.float8_e4m3fn), "f8_e4m3fn[2]"),
        (lambda: jnp.ones(1, jnp.complex64), "c64[1]"),
        (lambda: jnp.ones(1, jnp.uint8), "u8[1]"),
        (lambda: jnp.ones((0, 2)), "f32[0,2]"),
        (lambda: jax.random.key(0), "key<fry>[]"),
        (lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2), "key<rbg>[2]"),
        (lambda: np.ones(3), "f64[3](numpy)"),
        (lambda: np.float32(1), "np.float32(1.0)"),
        (lambda: np.array(1), "i64[](numpy)"),
        (
            lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
            "ShapeDtypeStruct(shape=(2,), dtype=float32)",
        ),
    ],
)
def test_arrays_print_as_dtype_and_shape(array, text):
    assert eqx.tree_pformat(array()) == text
    assert eqx.tree_pformat([array()]) == f"[{text}]"


def test_values_of_arrays_print_if_asked_for():
    assert eqx.tree_pformat([jnp.ones(2), np.ones(1)], short_arrays=False) == (
        "[Array([1., 1.], dtype=float32), array([1.])]"
    )


def test_deleted_arrays_print_without_their_values():
    x = jnp.ones(2)
    x.delete()
    assert eqx.tree_pformat([x]) == "[f32[2](deleted)]"
    assert eqx.tree_pformat([x], short_arrays=False) == "[f32[2](deleted)]"


def test_tracers_print_as_arrays():
    texts = []
    jax.jit(lambda x: texts.append(eqx.tree_pformat({"x": x})))(jnp.ones(2))
    jax.vmap(lambda x: texts.append(eqx.tree_pformat(x)))(jnp.ones((2, 3)))
    jax.jit(lambda x: texts.append(eqx.tree_pformat(x)))(1.0)
    assert texts == ["{'x': f32[2]}", "f32[3]", "weak_f32[]"]


def test_structs_print_as_arrays_if_asked_for():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert eqx.tree_pformat([struct], struct_as_array=True) == "[f32[2]]"
    text = eqx.tree_pformat([struct], struct_as_array=True, short_arrays=False)
    assert text == f"[{struct!r}]"


@jax.custom_jvp
def with_jvp(x):
    return x


@jax.custom_vjp
def with_vjp(x):
    return x


@functools.wraps(f)
def wrapper(x):
    return f(x)


@pytest.mark.parametrize(
    ("callable_", "text"),
    [
        (f, "<function f>"),
        (wrapper, "<wrapped function f>"),
        (jax.jit(f), "<wrapped function f>"),
        (functools.lru_cache(f), "<wrapped function f>"),
        (jax.nn.relu, "<wrapped function relu>"),
        (with_jvp, "<function with_jvp>"),
        (with_vjp, "<function with_vjp>"),
        (len, "<built-in function len>"),
        (int, "int"),
        (Point, f"{__name__}.Point"),
        (functools.partial(f, 1, y=jnp.tanh), None),
        (jtu.Partial(f, 1, y=2), None),
        (eqx.Partial(f, 1, y=2), None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_callables_print_by_name(callable_, text):
    if isinstance(callable_, jtu.Partial | eqx.Partial):
        text = "Partial(func=<function f>, args=(1,), keywords={'y': 2})"
    elif isinstance(callable_, functools.partial):
        text = "partial(<function f>, 1, y=<wrapped function tanh>)"
    assert eqx.tree_pformat(callable_) == text


def test_no_address_is_printed_for_functions():
    functions = [f, jax.jit(f), jax.nn.gelu, jax.grad(f), with_jvp, with_vjp]
    assert "0x" not in eqx.tree_pformat(functions)


@pytest.mark.parametrize("leaf", [1, 0.1, "it's", b"b", None, True, 1j], ids=repr)
def test_other_leaves_print_as_in_python(leaf):
    assert eqx.tree_pformat({"a": (leaf,)}) == f"{{'a': ({leaf!r},)}}"


def test_sets_and_named_tuples_print_as_in_python():
    pair = collections.namedtuple("pair", ["a", "b"])
    tree = [{1}, frozenset({1}), set(), frozenset(), pair(1, "b"), (), [], {}]
    assert eqx.tree_pformat(tree) == repr(tree)


# Dataclasses and Modules


def test_dataclass_shows_the_fields_that_are_not_default():
    assert eqx.tree_pformat(Point(1)) == "Point(x=1)"
    assert eqx.tree_pformat(Point(1, 2, hidden=5)) == "Point(x=1, y=2)"


def test_local_class_is_named_by_its_qualified_name():
    @dataclasses.dataclass
    class Local:
        x: int

    name = "test_local_class_is_named_by_its_qualified_name.<locals>.Local"
    assert eqx.tree_pformat(Local(1)) == f"{name}(x=1)"


def test_missing_fields_print_as_uninitialised():
    assert eqx.tree_pformat(Point.__new__(Point)) == "Point(x=<uninitialised>)"
    assert repr(Affine.__new__(Affine)) == "Affine(weight=<uninitialised>)"


def test_repr_of_a_module_is_its_pretty_text():
    model = Affine(jnp.ones((2, 3)), [np.ones(1)], name="first")
    text = "Affine(weight=f32[2,3], bias=[f64[1](numpy)], name='first')"
    assert repr(model) == str(model) == eqx.tree_pformat(model) == text


def test_repr_of_a_module_under_construction_shows_what_is_missing():
    texts = []

    class Model(eqx.Module):
        a: object
        b: object

        def __init__(self):
            self.a = 1
            texts.append(" ".join(repr(self).split()))
            self.b = 2

    Model()
    name = Model.__qualname__
    assert texts == [f"{name}( a=1, b=<uninitialised> )"]


def test_own_repr_of_a_module_is_not_used_inside_another_tree():
    class Model(eqx.Module):
        a: object

        def __repr__(self):
            return "mine"

    assert repr(Model(1)) == "mine"
    assert eqx.tree_pformat([Model(1)]) == f"[{Model.__qualname__}(a=1)]"


def test_pdoc_method_is_honoured():
    class Model(eqx.Module):
        a: object

        def __pdoc__(self, **kwargs):
            return wl.TextDoc("Model of ") + wl.pdoc(self.a, **kwargs)

    assert eqx.tree_pformat([Model(jnp.ones(2))]) == "[Model of f32[2]]"


# Layout


@pytest.mark.parametrize(
    "made, shown",
    [
        (lambda f: eqx.filter_jit(f, donate="all"), "<filter_jit of {}, donate='all'>"),
        (eqx.filter_vmap, "<filter_vmap of {}>"),
        (eqx.filter_grad, "<filter_grad of {}>"),
        (eqx.filter_value_and_grad, "<filter_value_and_grad of {}>"),
        (eqx.filter_jacrev, "<filter_jacrev of {}>"),
        (lambda f: eqx.filter_pmap(f, donate="none"), "<filter_pmap of {}>"),
        (eqx.debug.assert_max_traces(max_traces=1), "<assert_max_traces of {}>"),
    ],
)
def test_transformed_callables_print_what_they_wrap(made, shown):
    assert repr(made(f)) == shown.format("f")
    assert eqx.tree_pformat([made(f)]) == f"[{shown.format('<function f>')}]"
    layer = eqx.nn.LayerNorm(2)
    in_full = eqx.tree_pformat((made(layer), 1), width=999)
    assert in_full == f"({shown.format(eqx.tree_pformat(layer, width=999))}, 1)"


def test_long_containers_are_broken_into_one_child_per_line():
    model = Affine(jnp.ones((2, 3)), {"a": 1, "b": (jnp.ones(4), "text")})
    assert eqx.tree_pformat(model, width=30) == (
        "Affine(\n"
        "  weight=f32[2,3],\n"
        "  bias={\n"
        "    'a': 1,\n"
        "    'b': (f32[4], 'text')\n"
        "  }\n"
        ")"
    )


def test_indent_moves_children_in():
    partial = jtu.Partial(f, 1, 2)
    text = eqx.tree_pformat([partial, "x" * 20], width=20, indent=4)
    assert text == (
        "[\n"
        "    Partial(\n"
        "        func=<function f>,\n"
        "        args=(1, 2),\n"
        "        keywords={}\n"
        "    ),\n"
        f"    '{'x' * 20}'\n"
        "]"
    )


def test_truncated_nodes_print_as_their_type():
    model = Affine([1, 2], {"a": 3})
    text = eqx.tree_pformat(model, truncate_leaf=lambda x: isinstance(x, list | dict))
    assert text == "Affine(weight=list(...), bias=dict(...))"
    text = eqx.tree_pformat([model], truncate_leaf=lambda x: not isinstance(x, list))
    assert text == "[Affine(...)]"
    text = eqx.tree_pformat(model, truncate_leaf=lambda x: x is not model)
    assert text.startswith("Affine(weight=list(...), bias=dict(...)")


def test_structures_that_contain_themselves_print_as_recursive():
    items = [1]
    items.append(items)
    assert eqx.tree_pformat(items) == "[1, <recursive>]"
    partial = jtu.Partial(f, [])
    partial.args[0].append(partial)
    assert "args=([<recursive>],)" in eqx.tree_pformat(partial)
    for node in (Affine([1]), Point([1])):
        inner = next(iter(vars(node).values()))
        inner.append({"a": node})
        text = (
            f"{type(node).__name__}({next(iter(vars(node)))}=[1, {{'a': <recursive>}}])"
        )
        assert eqx.tree_pformat(node) == text
    # Twice the same object is no recursion.
    shared = [1]
    assert eqx.tree_pformat([shared, shared]) == "[[1], [1]]"


def test_pprint_prints_what_pformat_returns(capsys):
    tree = {"a": [jnp.ones(2)] * 20}
    eqx.tree_pprint(tree, width=30, indent=3, truncate_leaf=lambda x: x is None)
    assert capsys.readouterr().out == eqx.tree_pformat(tree, width=30, indent=3) + "\n"
