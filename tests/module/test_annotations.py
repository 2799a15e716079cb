"""Annotations that name what is not defined, as Python 3.14 allows.

Before, such annotations are strings: the code below is run as if it began with
`from __future__ import annotations`.
"""

import __future__

import dataclasses
import functools
import inspect
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx

ARE_LAZY = sys.version_info >= (3, 14)
SOURCE = """
class Tree(eqx.Module):
    value: jax.Array
    left: Tree | None = None
    right: Tree | None = None


class Undefined(eqx.Module):
    a: Missing
    b: list[Missing] = eqx.field(default=None, static=True)

    def method(self, x: Missing) -> Missing:
        return x

    @eqx.filter_jit
    def jitted(self, x: Missing) -> Missing:
        return x


class OwnInit(eqx.Module):
    a: Missing

    def __init__(self, x: Missing):
        self.a = x

    def __call__(self, x: Missing) -> Missing:
        return self.a * x


class Abstract(eqx.Module):
    a: eqx.AbstractVar[Missing]
    b: eqx.AbstractClassVar[Abstract]


class Concrete(Abstract):
    a: Missing
    b: typing.ClassVar[Missing] = 1


def convert(x: Missing) -> Missing:
    return x


class Converted(eqx.Module):
    a: Tree = eqx.field(converter=convert)
    b: Missing = eqx.field(converter=convert, default=1)

    def __init__(self, a: Missing, b: Later):
        self.a, self.b = a, b


class Wrapper(eqx.Module):
    fun: Callable[[Missing], Missing]

    @property
    def __wrapped__(self) -> Callable[[Missing], Missing]:
        return self.fun

    def __call__(self, x: Missing) -> Missing:
        return self.fun(x)


def square(x: Missing, *, power: Missing = 2) -> Missing:
    return x**power


class Later: ...
"""


@pytest.fixture(scope="module")
def code():
    flags = 0 if ARE_LAZY else __future__.annotations.compiler_flag
    scope = {
        "__name__": __name__,
        "eqx": eqx,
        "jax": jax,
        "typing": typing,
        "Callable": typing.Callable,
    }
    exec(compile(SOURCE, __file__, "exec", flags=flags, dont_inherit=True), scope)
    return scope


def test_module_names_itself(code):
    Tree = code["Tree"]
    tree = Tree(jnp.ones(1), left=Tree(jnp.zeros(1)))
    assert len(jax.tree.leaves(tree)) == 2
    assert eqx.tree_equal(eqx.filter_jit(lambda x: x)(tree), tree)
    hints = typing.get_type_hints(Tree.__init__, code)
    assert hints["left"] == typing.Optional[Tree]  # noqa: UP045


def test_type_of_a_field_is_not_defined(code):
    module = code["Undefined"](a=1.0)
    assert dataclasses.replace(module, a=2.0).a == 2.0
    assert "a=1.0" in repr(module)
    assert list(inspect.signature(type(module)).parameters) == ["a", "b"]
    assert module.method(2) == module.jitted(2) == 2
    assert "Missing" in str(code["Undefined"].__doc__)


def test_type_of_a_parameter_is_not_defined(code):
    module = code["OwnInit"](jnp.asarray(3.0))
    assert module(2.0) == eqx.filter_jit(module)(2.0) == 6.0
    assert eqx.filter_jit(module.__call__)(2.0) == 6.0


def test_abstract_variables(code):
    with pytest.raises(TypeError, match="abstract"):
        code["Abstract"]()
    assert code["Concrete"](2).a == 2
    assert list(inspect.signature(code["Concrete"]).parameters) == ["a"]


def test_declarations_stay_after_abstract_variables_are_hidden(code):
    annotations = eqx._annotations.annotations_of(code["Abstract"])
    assert list(annotations) == ["a", "b"]


def test_converters(code):
    tree = code["Tree"](jnp.ones(1))
    assert code["Converted"](tree, 2).b == 2


@pytest.mark.parametrize(
    "transform, expected",
    [
        (eqx.filter_jit, 9),
        (eqx.filter_jit(donate="arrays"), 9),
        (lambda f: lambda x: eqx.filter_vmap(f)(x[None]), [9]),
        (lambda f: lambda x: eqx.filter_pmap(f)(x[None]), [9]),
        (eqx.filter_grad, 6),
        (lambda f: lambda x: eqx.filter_value_and_grad(f)(x)[0], 9),
        (eqx.filter_jacfwd, 6),
        (eqx.filter_jacrev, 6),
        (eqx.filter_hessian, 2),
        (eqx.filter_checkpoint, 9),
        (lambda f: lambda x: len(eqx.filter_make_jaxpr(f)(x)[0].in_avals), 1),
        (lambda f: eqx.debug.assert_max_traces(f, max_traces=2), 9),
        (eqx.Partial, 9),
    ],
    ids=[
        "jit",
        "donating",
        "vmap",
        "pmap",
        "grad",
        "value_and_grad",
        "jacfwd",
        "jacrev",
        "hessian",
        "checkpoint",
        "make_jaxpr",
        "assert_max_traces",
        "Partial",
    ],
)
def test_function_is_transformed(code, transform, expected):
    out = transform(code["square"])(jnp.asarray(3.0))
    np.testing.assert_allclose(out, expected)


def test_custom_rules(code):
    f = eqx.filter_custom_vjp(code["square"])
    f.def_fwd(lambda perturbed, x: (x**2, None))
    f.def_bwd(lambda residuals, grad, perturbed, x: 5 * grad)
    assert eqx.filter_grad(f)(3.0 * jnp.ones(())) == 5


@pytest.mark.parametrize("name", ["method", "partial", "jitted", "wrapper"])
def test_wrappers_show_the_annotations(code, name):
    square = code["square"]
    wrapper = {
        "method": lambda: code["Undefined"](1.0).method,
        "partial": lambda: eqx.Partial(square),
        "jitted": lambda: eqx.filter_jit(square),
        "wrapper": lambda: eqx.module_update_wrapper(code["Wrapper"](square)),
    }[name]()
    if ARE_LAZY:
        with pytest.raises(NameError, match="Missing"):
            _ = wrapper.__annotations__
        import annotationlib

        string = annotationlib.Format.STRING
        found = annotationlib.get_annotations(wrapper, format=string)
    else:
        found = wrapper.__annotations__
    assert found["x"] == found["return"] == "Missing"

    @functools.wraps(wrapper)
    def outer(*args): ...

    if ARE_LAZY:
        assert annotationlib.get_annotations(outer, format=string) == found
    else:
        assert outer.__annotations__ == found
