"""filter_jit: what is traced, what is static, when it compiles, what comes back."""

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings
from strategies import trees

import equinox_like as eqx


class Model(eqx.Module):
    weight: Any
    activation: Any = jnp.tanh
    size: int = eqx.field(static=True, default=3)

    def __call__(self, x, *, bias=0.0):
        return self.activation(self.weight * x) + bias

    @eqx.filter_jit
    def jitted(self, x, power=1):
        return self(x) ** power

    @eqx.filter_jit(donate="none")
    def with_option(self, x):
        return self(x)


class Counter:
    """Counts how often a function is traced, and with which static values."""

    def __init__(self, fun=lambda *args, **kwargs: (args, kwargs)):
        self.seen = []
        self.fun = fun

        @eqx.filter_jit
        def f(*args, **kwargs):
            self.seen.append((args, kwargs))
            return self.fun(*args, **kwargs)

        self.f = f

    def __call__(self, *args, **kwargs):
        return self.f(*args, **kwargs)

    @property
    def count(self):
        return len(self.seen)


def module_level(x):
    return x + 1


def same(a, b):
    if eqx.is_array(b):
        return isinstance(a, jax.Array) and bool((a == jnp.asarray(b)).all())
    return a is b


@settings(max_examples=25)
@given(trees())
def test_any_tree_passes_through(tree):
    out = eqx.filter_jit(lambda t: t)(tree)
    a, treedef = jtu.tree_flatten(out)
    b, expected = jtu.tree_flatten(tree)
    assert treedef == expected
    assert all(map(same, a, b))


class TestStatics:
    def test_values_of_other_types_compile_anew(self):
        f = Counter(lambda x, k: (x * 2, k))
        for k in (1, 1.0, True, 1, 1.0, True):
            _, out = f(jnp.ones(2), k)
            assert type(out) is type(k)
        assert f.count == 3

    def test_signed_zeros_differ_and_nans_do_not(self):
        f = Counter()
        for k in (0.0, -0.0, float("nan"), float("nan"), 0.0, 0j, complex(0.0, -0.0)):
            f(jnp.ones(2), k)
        assert f.count == 5

    def test_types_count_at_any_depth_and_in_static_fields(self):
        f = Counter(lambda m: m)
        for size in (1, True, 1.0, (1,), (True,), frozenset({1}), frozenset({1.0})):
            for _ in range(2):
                assert type(f(Model(jnp.ones(2), size=size)).size) is type(size)
        assert f.count == 7
        f(Model(jnp.ones(2), activation=frozenset({0.0})))
        f(Model(jnp.ones(2), activation=frozenset({-0.0})))
        assert f.count == 9

    def test_other_shapes_dtypes_and_weak_types_compile_anew(self):
        f = Counter()
        for x in (
            jnp.ones(2),
            jnp.ones(3),
            jnp.arange(2),
            jnp.asarray(1.0),
            jnp.ones(()),
        ):
            f(x)
            f(x)
        assert f.count == 5

    def test_configuration_compiles_anew(self):
        f = Counter(lambda x: x * np.float64(2))
        assert f(np.ones(2)).dtype == jnp.float32
        with jax.enable_x64(True):
            assert f(np.ones(2)).dtype == jnp.float64
        assert f.count == 2

    def test_how_an_argument_is_passed_makes_no_difference(self):
        traces = []

        @eqx.filter_jit
        def f(a, b, *, c):
            traces.append(1)
            return a - b * c

        x, y, z = jnp.asarray([3.0, 2.0, 1.0])
        for out in (f(x, y, c=z), f(x, c=z, b=y), f(c=z, b=y, a=x), f(b=y, a=x, c=z)):
            assert out == 1.0
        assert len(traces) == 1

    def test_default_that_is_given_is_another_call(self):
        traces = []

        @eqx.filter_jit
        def f(a, b=1):
            traces.append(1)
            return a + b

        assert f(jnp.ones(2)).tolist() == f(jnp.ones(2), 1).tolist() == [2, 2]
        assert len(traces) == 2

    def test_unhashable_static_leaf_is_refused_by_its_path(self):
        @eqx.filter_jit
        def f(model, options):
            return model

        with pytest.raises(
            ValueError, match=r"`options\['deep'\]\[1\]` is a set.*array"
        ):
            f(jnp.ones(2), {"deep": [1, set()]})

    def test_unhashable_static_field_is_fine(self):
        f = Counter(lambda m: m.weight)
        for _ in range(2):
            f(Model(jnp.ones(2), size=["a", {"b"}]))
        assert f.count == 1

    def test_numpy_arrays_are_traced(self):
        f = Counter(lambda x: x + 1)
        assert isinstance(f(np.ones(2, np.float32)), jax.Array)
        f(np.zeros(2, np.float32))
        f(jnp.zeros(2, jnp.float32))
        assert f.count == 1
        assert isinstance(eqx.filter_jit(lambda: np.ones(2))(), jax.Array)


class TestOutputs:
    def test_what_is_no_array_comes_back_as_the_very_object(self):
        marker = object()
        f = Counter(lambda x: {"x": x, "marker": marker, "set": unhashable})
        unhashable = {1, 2}
        for _ in range(2):
            out = f(jnp.ones(2))
            assert out["marker"] is marker and out["set"] is unhashable
        assert f.count == 1

    def test_static_output_may_depend_on_shapes(self):
        f = eqx.filter_jit(lambda x: x.shape)
        assert [f(jnp.ones(n)) for n in (2, 3, 2)] == [(2,), (3,), (2,)]

    def test_outputs_without_arrays_work(self):
        assert eqx.filter_jit(lambda: None)() is None
        assert eqx.filter_jit(lambda: "text")() == "text"
        assert eqx.filter_jit(lambda x: ())(jnp.ones(2)) == ()

    def test_modules_come_back_as_modules(self):
        out = eqx.filter_jit(lambda m: m)(Model(jnp.ones(2), jax.nn.relu, size=5))
        assert (
            isinstance(out, Model) and out.activation is jax.nn.relu and out.size == 5
        )

    def test_dict_keys_reach_the_function_sorted(self):
        assert eqx.filter_jit(lambda d: list(d))({"b": 1, "a": jnp.ones(1)}) == [
            "a",
            "b",
        ]


class TestCallables:
    model = Model(jnp.asarray(2.0), lambda x: x)

    @pytest.mark.parametrize(
        "fun",
        [
            model,
            model.__call__,
            lambda x: 2 * x,
            functools.partial(lambda a, x: a * x, 2.0),
            functools.partial(model),
            eqx.Partial(lambda a, x: a * x, jnp.asarray(2.0)),
            jtu.Partial(lambda a, x: a * x, jnp.asarray(2.0)),
            jax.jit(lambda x: 2 * x),
            eqx.filter_jit(lambda x: 2 * x),
            eqx.filter_jit(model),
        ],
        ids=[
            "module",
            "method",
            "lambda",
            "functools.partial",
            "functools.partial of a module",
            "Partial",
            "jax.tree_util.Partial",
            "jax.jit",
            "filter_jit",
            "filter_jit of a module",
        ],
    )
    def test_everything_that_can_be_called_can_be_wrapped(self, fun):
        f = eqx.filter_jit(fun)
        for _ in range(2):
            assert f(jnp.asarray(3.0)) == 6.0

    def test_class_can_be_wrapped(self):
        made = eqx.filter_jit(Model)(jnp.ones(2), size=7)
        assert isinstance(made, Model) and made.size == 7

    def test_methods_are_compiled_for_all_instances_at_once(self):
        model, other = Model(jnp.ones(2)), Model(jnp.zeros(2))
        assert jnp.allclose(model.jitted(1.0, power=2), jnp.tanh(1.0) ** 2)
        assert jnp.allclose(other.jitted(1.0), 0.0)
        assert jnp.allclose(Model.jitted(model, 1.0), jnp.tanh(1.0))
        assert jnp.allclose(model.with_option(1.0), jnp.tanh(1.0))
        assert jtu.tree_leaves(model.jitted)[0] is model.weight

    def test_method_is_a_partial_of_which_parts_may_be_replaced(self):
        method = Model(jnp.ones(2)).jitted
        assert isinstance(method, eqx.Partial)
        doubled = eqx.tree_at(lambda m: m.args[0].weight, method, jnp.full(2, 2.0))
        assert jnp.allclose(doubled(1.0), jnp.tanh(2.0))
        named = eqx.tree_at(lambda m: m.keywords, method, {"power": 2})
        assert jnp.allclose(named(1.0), jnp.tanh(1.0) ** 2)
        listed = eqx.tree_at(lambda m: m.args, method, list(method.args))
        assert jnp.allclose(listed(1.0), jnp.tanh(1.0))
        other = eqx.tree_at(lambda m: m.func, method, lambda model, x: model.weight + x)
        assert other(1.0).tolist() == [2, 2]

    def test_super_static_and_class_methods_work(self):
        class Derived(Model):
            @eqx.filter_jit
            def jitted(self, x, power=1):
                return super().jitted(x, power) + 1

            @staticmethod
            @eqx.filter_jit
            def static(x):
                return x + 1

            @classmethod
            @eqx.filter_jit
            def make(cls, x):
                return cls(x)

        derived = Derived(jnp.zeros(()))
        assert derived.jitted(1.0) == 1.0 and derived.static(jnp.ones(())) == 2.0
        assert isinstance(Derived.make(jnp.ones(2)), Derived)

    def test_ordinary_class_may_have_a_compiled_method(self):
        class Plain:
            @eqx.filter_jit
            def f(self, x):
                return x + 1

        assert Plain().f(jnp.ones(())) == 2

    def test_arrays_of_the_callable_are_traced(self):
        f = eqx.filter_jit(lambda m, x: eqx.filter_jit(m)(x))
        assert f(Model(jnp.ones(2)), 0.0).tolist() == [0, 0]
        traces = []

        class Traced(eqx.Module):
            weight: Any

            def __call__(self, x):
                traces.append(1)
                return self.weight * x

        assert eqx.filter_jit(Traced(jnp.asarray(2.0)))(3.0) == 6.0
        assert eqx.filter_jit(Traced(jnp.asarray(4.0)))(3.0) == 12.0
        assert len(traces) == 1

    def test_wrapping_a_function_twice_shares_the_compiled_code(self):
        traces = []

        def f(x):
            traces.append(1)
            return x

        for _ in range(3):
            eqx.filter_jit(f)(jnp.ones(2))
        assert len(traces) == 1
        eqx.filter_jit(f, donate="arrays")(jnp.ones(2))
        assert len(traces) == 2

    def test_signature_may_depend_on_a_static_leaf_of_the_callable(self):
        class Wrapper(eqx.Module):
            f: Any

            @property
            def __wrapped__(self):
                return self.f

            def __call__(self, *args, **kwargs):
                return self.f(*args, **kwargs)

        x, y = jnp.asarray(5.0), jnp.asarray(3.0)
        assert eqx.filter_jit(Wrapper(lambda a, b: a - b))(a=x, b=y) == 2.0
        assert eqx.filter_jit(Wrapper(lambda b, a: a - b))(a=x, b=y) == 2.0

    def test_name_doc_and_signature_are_those_of_the_function(self):
        @eqx.filter_jit
        def documented(x, *, y: int = 1) -> int:
            """Doc."""
            return x

        assert documented.__name__ == "documented" and documented.__doc__ == "Doc."
        assert documented.__module__ == __name__
        assert list(inspect.signature(documented).parameters) == ["x", "y"]
        again = jtu.tree_map(lambda x: x, documented)
        assert again.__name__ == "documented" and again(1) == 1

    def test_any_keyword_may_be_used(self):
        f = eqx.filter_jit(lambda **kwargs: sorted(kwargs))
        assert f(self=1, fun=2, args=3) == ["args", "fun", "self"]

    @pytest.mark.parametrize("donate", ["none", "arrays", ("b",)])
    def test_keyword_only_parameters_need_no_alphabetical_order(self, donate):
        @eqx.filter_jit(donate=donate)
        def f(*, b, a, power):
            return b - 2 * a**power

        assert f(b=jnp.ones(()), a=jnp.zeros(()), power=2) == 1
        assert f(power=2, a=jnp.zeros(()), b=jnp.ones(())) == 1

    def test_function_that_is_wrapped_again_has_its_new_defaults(self):
        def f(x, y):
            return x, y

        assert eqx.filter_jit(f)(1, 2) == (1, 2)
        f.__defaults__ = (3,)
        assert eqx.filter_jit(f)(1) == (1, 3)

    def test_equal_wraps_are_equal_and_hash_alike(self):
        assert eqx.filter_jit(module_level) == eqx.filter_jit(module_level)
        assert hash(eqx.filter_jit(module_level)) == hash(eqx.filter_jit(module_level))
        assert eqx.filter_jit(module_level) != eqx.filter_jit(
            module_level, donate="all"
        )

    def test_repr_shows_name_and_donation(self):
        shown = repr(eqx.filter_jit(module_level, donate="warn"))
        assert "module_level" in shown and "'warn'" in shown

    def test_wrapper_can_be_pickled_and_copied(self):
        f = eqx.filter_jit(module_level, donate="arrays")
        for again in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f), copy.copy(f)):
            assert again(jnp.ones(())) == 2 and "'arrays'" in repr(again)
        model = pickle.loads(pickle.dumps(eqx.filter_jit(Model(jnp.ones(2), abs))))
        assert model(0.0).tolist() == [0, 0]


# In a process of its own, where no annotations are checked, which takes more frames.
DEEP = """
import equinox_like as eqx
import jax.numpy as jnp

class Node(eqx.Module):
    value: object
    next: object

nested, linked = [], None
for i in range(800):
    nested, linked = [nested], Node(jnp.ones(()), linked)
f = eqx.filter_jit(lambda tree: tree)
assert f(f(linked)).next.next.value == 1 and len(f(nested)) == 1
"""


def test_trees_may_be_almost_as_deep_as_the_limit_of_recursions():
    run = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@dataclasses.dataclass
class Unregistered:
    loss: object


class TestOutputWhoseClassIsNoPytree:
    @pytest.mark.parametrize("hide", [lambda x: x, lambda x: {"a": [x]}])
    def test_arrays_in_it_are_refused_by_its_path(self, hide):
        f = eqx.filter_jit(lambda x: {"out": Unregistered(hide(x))})
        for call in (f, f.lower, f.eval_shape):
            with pytest.raises(
                TypeError, match=r"a Unregistered at `out\['out'\]`.*in `loss`"
            ):
                call(jnp.ones(2))

    def test_without_arrays_it_is_returned_as_it_is(self):
        kept = Unregistered({1: "a", "b": 2})  # keys that JAX cannot sort
        assert eqx.filter_jit(lambda x: (x, kept))(jnp.ones(2))[1] is kept


@jtu.register_pytree_node_class
class ArraysAsChildren:
    """As distributions of distrax: only arrays are children."""

    def __init__(self, **values):
        self.values = values

    def tree_flatten(self):
        values = sorted(self.values.items())
        names = [name for name, x in values if isinstance(x, jax.Array)]
        others = tuple((name, x) for name, x in values if name not in names)
        return [self.values[name] for name in names], (tuple(names), others)

    @classmethod
    def tree_unflatten(cls, aux, children):
        names, others = aux
        return cls(**dict(zip(names, children, strict=True)), **dict(others))


class TestNodeWhoseChildrenDependOnTheirValues:
    def test_it_is_an_argument(self):
        node, other = ArraysAsChildren(a=jnp.ones(2), b=2.0), jnp.ones(2)
        f = eqx.filter_jit(lambda node: node.values["a"].sum(), donate="strict")
        with pytest.raises(eqx.DonationError, match=r"not usable: `node.<leaf 0>`"):
            f(node)
        f = eqx.filter_jit(lambda node, x, n: node.values["a"] * x * n)
        assert f(node, other, 3).tolist() == [3, 3]
        (difference,) = f.explain(node, other, 4).differences
        assert difference.path == "n"
        larger = ArraysAsChildren(a=jnp.ones((2, 2)), b=2.0)
        (difference,) = f.explain(larger, other, 3).differences
        assert difference.path == "node.<leaf 0>" and difference.kind == "shape"

    def test_names_of_the_other_arguments_are_whole(self):
        f = eqx.filter_jit(lambda node, x: x["a"][0], donate=("x",))
        node, x = ArraysAsChildren(a=jnp.ones(2)), {"a": [jnp.ones(2)]}
        f(node, x)
        with pytest.raises(eqx.DonationError, match=r"`x\['a'\]\[0\]`"):
            f(node, x)

    def test_it_goes_through_loops_and_derivatives(self):
        node = ArraysAsChildren(a=jnp.ones(2), b=2.0)
        double = lambda n: ArraysAsChildren(a=2 * n.values["a"], b=2.0)  # noqa: E731
        out, _ = eqx.filter_scan(lambda n, x: (double(n), x), node, jnp.arange(2))
        assert out.values["a"].tolist() == [4, 4]
        grad = eqx.filter_grad(lambda n: (n.values["a"] ** 2).sum())(node)
        assert grad.values["a"].tolist() == [2, 2]
        with pytest.raises(ValueError, match=r"The static leaf `more` is .*set"):
            eqx.filter_jit(lambda n, more: n)(node, {1})


class TestNests:
    def f(self, x, k):
        return x * k, k

    def test_under_jax_transformations(self):
        f = eqx.filter_jit(lambda x, k: x**k)
        x = jnp.asarray([1.0, 2.0, 3.0])
        assert jax.jit(lambda x: f(x, 2))(x).tolist() == [1, 4, 9]
        assert jax.vmap(lambda x: f(x, 2))(x).tolist() == [1, 4, 9]
        assert jax.vmap(lambda x: jax.grad(lambda y: f(y, 2))(x))(x).tolist() == [
            2,
            4,
            6,
        ]
        assert jax.jvp(lambda x: f(x, 2), (x,), (x,))[1].tolist() == [2, 8, 18]
        assert jax.eval_shape(lambda x: f(x, 2), x).shape == (3,)
        out, _ = jax.lax.scan(lambda c, x: (f(c, 2), None), jnp.asarray(2.0), x)
        assert out == 256.0

    def test_around_and_inside_one_another(self):
        loss = eqx.filter_jit(lambda m, x: m(x).sum())
        model = Model(jnp.ones(2))
        inside = eqx.filter_jit(eqx.filter_grad(loss))(model, 0.5)
        outside = eqx.filter_grad(loss)(model, 0.5)
        expected = 0.5 * (1 - jnp.tanh(0.5) ** 2)
        assert jnp.allclose(inside.weight, expected)
        assert jnp.allclose(outside.weight, expected)
        assert inside.activation is None

    def test_static_outputs_pass_through_an_outer_jit(self):
        inner = eqx.filter_jit(self.f)
        assert eqx.filter_jit(lambda x: inner(x, 3))(jnp.ones(2))[1] == 3

    def test_disable_jit_runs_the_function_itself(self):
        seen = []

        @eqx.filter_jit(donate="arrays")
        def f(x, k):
            seen.append(isinstance(x, jax.core.Tracer))
            return x + 1, k

        x = jnp.ones(2)
        with jax.disable_jit():
            out, k = f(x, "text")
        assert out.tolist() == [2, 2] and k == "text" and seen == [False]
        assert not x.is_deleted()
        f(x, "text")
        assert seen == [False, True]

    def test_stages_trace_under_disable_jit_too(self):
        f = eqx.filter_jit(lambda x: {"x": 2 * x, "name": "text"}, donate="all")
        x = jnp.ones(2)
        with jax.disable_jit():
            shown = f.eval_shape(x)
            assert shown["name"] == "text" and shown["x"].shape == (2,)
            assert f.lower(x).out_info == f.trace(x).out_info == shown
            assert f.donation_report(x).rows[0].output == "output['x']"
            assert f(x)["x"].tolist() == [2, 2] and not x.is_deleted()
        assert f(x)["x"].tolist() == [2, 2]


class TestErrors:
    @pytest.mark.parametrize("bad", [3, "text", None, jnp.ones(2)], ids=repr)
    def test_what_cannot_be_called_is_refused(self, bad):
        with pytest.raises(TypeError, match="wraps a function"):
            eqx.filter_jit(bad)

    def test_builtin_without_signature_is_refused(self):
        with pytest.raises(ValueError, match="signature"):
            eqx.filter_jit(type)

    @pytest.mark.parametrize("args", [(), (1, 2)])
    def test_wrong_arguments_are_refused_before_tracing(self, args):
        with pytest.raises(TypeError, match="module_level"):
            eqx.filter_jit(module_level)(*args)

    @pytest.mark.parametrize(
        "name",
        ["static_argnums", "static_argnames", "donate_argnums", "donate_argnames"],
    )
    def test_what_jit_takes_and_we_decide_is_refused(self, name):
        with pytest.raises(ValueError, match=name):
            eqx.filter_jit(module_level, **{name: 0})

    @pytest.mark.parametrize("name", ["default", "fn", "args", "kwargs", "out"])
    def test_long_gone_arguments_are_refused(self, name):
        with pytest.raises(ValueError, match="deprecated"):
            eqx.filter_jit(module_level, **{name: 0})

    def test_unknown_option_is_refused_when_wrapping(self):
        with pytest.raises(TypeError, match="unknown"):
            eqx.filter_jit(module_level, unknown=1)

    def test_jit_options_reach_jax(self):
        inlined = eqx.filter_jit(module_level, inline=True)
        assert "pjit" not in str(jax.make_jaxpr(lambda x: inlined(x))(1.0))
        assert "jit" in str(
            jax.make_jaxpr(lambda x: eqx.filter_jit(module_level)(x))(1.0)
        )

    def test_exception_of_the_function_is_raised_unchanged(self):
        class MyError(Exception):
            pass

        cause = KeyError("the cause")

        @eqx.filter_jit
        def f(x):
            raise MyError("mine") from cause

        for call in f, f.lower, f.eval_shape:
            with pytest.raises(MyError, match="mine") as caught:
                call(jnp.ones(2))
            assert caught.value.__cause__ is cause and caught.value.__context__ is None

    @pytest.mark.parametrize("donate", ["none", "all"])
    @pytest.mark.parametrize("dtype", ["U1", "O", "M8[D]"])
    def test_array_of_text_or_objects_is_named(self, dtype, donate):
        f = eqx.filter_jit(lambda batch: batch["x"] + 1, donate=donate)
        batch = {"x": jnp.ones(1), "id": np.zeros(1, dtype)}
        for call in f, f.lower:
            with pytest.raises(TypeError) as caught:
                call(batch)
            (note,) = (n for n in caught.value.__notes__ if "batch" in n)
            assert "`batch['id']` is a NumPy array of dtype" in note
        assert f({"x": jnp.ones(1), "id": tuple(batch["id"].tolist())}) == 2

    @pytest.mark.parametrize("name", ["explain", "lower", "trace", "eval_shape"])
    def test_stage_of_a_bound_method_is_refused_with_the_fix(self, name):
        class Scaled(eqx.Module):
            factor: jax.Array

            @eqx.filter_jit
            def scale(self, x):
                return self.factor * x

        model = Scaled(jnp.ones(()))
        with pytest.raises(AttributeError) as caught:
            getattr(model.scale, name)
        code = str(caught.value).split("`")[-2]
        assert code == f"Scaled.scale.{name}(instance, ...)"
        eval(code.replace("instance, ...", "model, 1"), locals())

    def test_errors_of_jax_name_function_file_and_path(self):
        @eqx.filter_jit
        def decide(flags, x):
            return x if flags["deep"][0] else -x

        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            decide({"deep": [jnp.asarray(True)]}, x=jnp.ones(2))
        message = str(caught.value)
        assert re.search(r"decide at .*test_jit\.py:\d+ for jit", message)
        assert "flags['deep'][0]" in message

    def test_compiled_program_has_the_functions_name(self):
        assert "jit_module_level" in eqx.filter_jit(module_level).lower(1.0).as_text()


def test_call_returns_before_the_computation_ends():
    @eqx.filter_jit
    def long(x):
        return jax.lax.fori_loop(0, 150, lambda _, y: jnp.sin(y @ y) * 1e-3, x)

    x = jnp.ones((400, 400))
    long(x).block_until_ready()
    ready = []
    for _ in range(3):
        out = long(x)
        ready.append(out.is_ready())
        out.block_until_ready()
    assert not all(ready)


def test_threads_may_call_one_function_at_once():
    f = eqx.filter_jit(lambda x, k: (x * k, k), donate="arrays")
    failures = []

    def work(seed):
        try:
            for i in range(40):
                k = (seed + i) % 5
                out, again = f(jnp.full(3, 2.0), k)
                assert again == k and out.tolist() == [2.0 * k] * 3
        except BaseException as e:
            failures.append(e)

    filters = list(warnings.filters)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and warnings.filters == filters


@pytest.mark.parametrize("donate", ["none", "arrays"])
def test_function_that_dies_takes_its_programs_along(donate):
    def make():
        constant = jnp.ones(10)

        def f(x):
            return x + constant

        jitted = eqx.filter_jit(f, donate=donate)
        jitted(jnp.ones(10))
        return weakref.ref(f), weakref.ref(jitted._program)

    function, program = make()
    gc.collect()
    assert function() is None and program() is None


def test_static_value_that_leads_to_its_function_is_let_go_of_on_clearing():
    class Trainer:
        def __init__(self):
            self.step = eqx.filter_jit(lambda x, log: x + 1)

        def log(self):
            pass

    trainer = Trainer()
    trainer.step(jnp.ones(2), trainer.log)
    reference = weakref.ref(trainer)
    del trainer
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def test_threads_that_come_first_together_compile_once():
    start, traces = threading.Barrier(8), []

    @eqx.filter_jit
    def f(x, k):
        traces.append(k)
        return x * k

    def work():
        start.wait()
        f(jnp.ones(3), 2)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traces == [2]


def test_memory_is_bounded_while_statics_change():
    from equinox_like._jit import layout

    f = eqx.filter_jit(lambda x, k: k, donate="none")
    program = f._program
    # One compiled program is enough: what is bounded are the tables.
    for k in range(3):
        f(jnp.ones(()), k)
    assert len(program._specializations) == 3 and len(program.layouts.by_structure) == 1
    table = dict.fromkeys(range(layout.MAX_KEPT))
    layout.add_bounded(table, "new", None)
    assert len(table) == layout.MAX_KEPT and 0 not in table and "new" in table


def test_dispatch_does_not_trace_again():
    f = Counter()
    start = time.perf_counter()
    for i in range(100):
        f(jnp.asarray(float(i)), {"k": [1, "text", None]}, flag=True)
    assert f.count == 1 and time.perf_counter() - start < 60


def test_callable_pytrees_of_other_classes_share_nothing():
    traced = []

    class First(eqx.Module):
        def __call__(self, x, n):
            traced.append(self)
            return x

    class Second(First):
        pass

    first, second = eqx.filter_jit(First()), eqx.filter_jit(Second())
    x = jnp.ones(2)
    second(x, 0)
    for n in range(200):
        first.eval_shape(x, n)
    traced.clear()
    second(x, 0)
    assert not traced and second._program is not first._program
    assert eqx.filter_jit(First())._program is first._program
    assert len(list(second._program.traces())) == 1
