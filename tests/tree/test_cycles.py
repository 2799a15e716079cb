"""A tree that contains itself: the error names the place, and the process stays sound.

JAX flattens such a tree until the stack is full. Where that runs Python code, it leaves
Python's count of open calls too high, and every later call fails (jax 0.10 to 0.12).
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given, strategies as st

import equinox_like as eqx


@jtu.register_pytree_with_keys_class
class Box:
    def __init__(self, x: Any = None):
        self.x = x

    def tree_flatten_with_keys(self):
        return ((jtu.GetAttrKey("x"), self.x),), None

    def tree_flatten(self):
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class Holder(eqx.Module):
    items: Any


class Pair(NamedTuple):
    one: Any
    other: Any


def in_list():
    tree: list[Any] = [jnp.ones(2)]
    tree.append(tree)
    return tree, "", "[1]"


def in_dict():
    tree: dict[str, Any] = {"w": jnp.ones(2)}
    tree["me"] = tree
    return tree, "", "['me']"


def in_ordered_dict():
    tree: OrderedDict[str, Any] = OrderedDict(w=jnp.ones(2))
    tree["me"] = tree
    return tree, "", "['me']"


def in_box():
    tree = Box()
    tree.x = [tree]
    return tree, "", ".x[0]"


def in_tuples():
    inner: list[Any] = []
    inner.append(Pair(1, (inner,)))
    return {"top": (jnp.ones(()), inner)}, "['top'][1]", "['top'][1][0].other[0]"


def in_module():
    items: list[Any] = [jnp.ones(2)]
    module = Holder(items)
    items.append(module)
    return [module], "[0]", "[0].items[1]"


MAKERS = [in_list, in_dict, in_ordered_dict, in_box, in_tuples, in_module]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def cyclic(request) -> tuple[Any, str, str]:
    return request.param()


def refused(call: Callable[[], Any], above: str, below: str) -> None:
    with pytest.raises(ValueError, match="contains itself, at") as caught:
        call()
    text = str(caught.value)
    assert f"at `{above}` contains itself, at `{below}`." in text
    assert "refer to it by a name or an index" in text
    assert nested(sys.getrecursionlimit() // 2)  # JAX has not used up the stack


def nested(n: int) -> bool:
    return n == 0 or nested(n - 1)


def test_field_that_contains_itself_is_named(cyclic):
    tree, above, below = cyclic

    class Assigned(eqx.Module):
        items: Any

        def __init__(self, items):
            self.items = items

    class Static(eqx.Module):
        items: Any = eqx.field(static=True)

    for kind in (
        Holder,
        Assigned,
        Static,
        eqx.frozen,
        eqx.Partial(Holder, items=1).func,
    ):
        name = "self.value" if kind is eqx.frozen else "self.items"
        if isinstance(tree, list) and isinstance(tree[0], Holder):
            continue  # a Module is searched when it is constructed
        refused(lambda kind=kind: kind(tree), name + above, name + below)


def test_argument_of_filter_jit_that_contains_itself_is_named(cyclic):
    tree, above, below = cyclic

    def fun(a, *rest, conf=None):
        return a

    donating = eqx.filter_jit(fun, donate="all")
    refused(lambda: donating(tree), f"a{above}", f"a{below}")
    jitted = eqx.filter_jit(fun)
    refused(lambda: jitted(tree), f"a{above}", f"a{below}")
    refused(lambda: jitted(1, 2, tree), f"rest[1]{above}", f"rest[1]{below}")
    refused(lambda: jitted(1, conf=tree), f"conf{above}", f"conf{below}")
    for stage in (
        jitted.lower,
        jitted.eval_shape,
        jitted.explain,
        eqx.filter_export(fun),
    ):
        refused(lambda stage=stage: stage(tree), f"a{above}", f"a{below}")
    assert jitted(jnp.ones(())) == 1


def test_output_of_a_traced_function_that_contains_itself_is_named(cyclic):
    tree, above, below = cyclic
    jitted = eqx.filter_jit(lambda x: tree)
    refused(lambda: jitted(jnp.ones(2)), f"<output>{above}", f"<output>{below}")


def test_callable_that_contains_itself_is_named():
    items: list[Any] = []

    class Model(eqx.Module):
        items: list

        def __call__(self, x):
            return x

    model = Model(items)
    items.append(model)
    refused(
        lambda: eqx.filter_jit(lambda f, x: f(x))(model, jnp.ones(2)),
        "f",
        "f.items[0]",
    )


def test_saved_tree_that_contains_itself_is_named(cyclic, tmp_path):
    tree, above, below = cyclic
    eqx.save(tmp_path / "there", [1])
    refused(lambda: eqx.save(tmp_path / "new", tree), f"tree{above}", f"tree{below}")
    refused(lambda: eqx.load(tmp_path / "there", tree), f"like{above}", f"like{below}")
    for function in (eqx.state_dict, lambda tree: eqx.load_state_dict(tree, {})):
        refused(lambda f=function: f(tree), f"tree{above}", f"tree{below}")
    path = tmp_path / "leaves"
    refused(
        lambda: eqx.tree_serialise_leaves(path, tree),
        f"pytree{above}",
        f"pytree{below}",
    )
    assert [file.name for file in tmp_path.iterdir()] == ["there.safetensors"]


def test_chosen_tree_that_contains_itself_is_named(cyclic):
    tree, above, below = cyclic
    refused(lambda: eqx.select(tree), f"tree{above}", f"tree{below}")
    refused(lambda: eqx.nn.inference_mode(tree), f"pytree{above}", f"pytree{below}")


# By the name of the parameter.
LIST_FUNCTIONS = {
    "pytree": [
        lambda tree: eqx.partition(tree, eqx.is_array),
        lambda tree: eqx.filter(tree, eqx.is_array),
        lambda tree: eqx.tree_at(lambda t: t[0], tree, 1),
        eqx.tree_copy,
    ],
    "pytrees[0]": [lambda tree: eqx.tree_equal(tree, tree)],
    "tree": [
        lambda tree: eqx.internal.split(tree, lambda leaf: "data"),
        lambda tree: eqx.filter_grad(lambda tree: 1.0)(tree),
        lambda tree: eqx.filter_vmap(lambda tree: 1.0)(tree),
        lambda tree: eqx.filter_checkpoint(lambda tree: 1.0)(tree),
    ],
}


@pytest.mark.parametrize("make", [in_list, in_tuples])
def test_list_that_contains_itself_is_named_in_the_errors_of_jax(make):
    tree, above, below = make()
    for name, functions in LIST_FUNCTIONS.items():
        for function in functions:
            refused(lambda f=function: f(tree), name + above, name + below)
    jitted = eqx.filter_jit(lambda tree: 1)
    assert jitted([jnp.ones(2)]) == 1  # after a call, only the error of JAX tells
    for _ in range(100):
        refused(lambda: jitted(tree), f"tree{above}", f"tree{below}")


def test_node_that_occurs_twice_is_no_cycle(tmp_path):
    shared = [jnp.ones(2)]
    tree = {"a": shared, "b": [shared, shared], "c": Holder(shared)}
    eqx.save(tmp_path / "file", tree)
    assert len(jax.tree.leaves(eqx.filter_jit(lambda tree: tree)(tree))) == 4


def test_node_that_is_made_anew_without_end_is_not_searched_without_end(tmp_path):
    class Endless:
        pass

    jtu.register_pytree_node(
        Endless, lambda _: ((Endless(),), None), lambda *_: Endless()
    )
    from equinox_like._tree.cycles import check_no_cycle

    check_no_cycle("tree", Endless())  # returns


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_cycle_is_found_at_any_place(arities, data):
    containers: list[list[Any]] = [[]]
    for arity in arities:  # a random tree of lists
        parent = data.draw(st.sampled_from(containers))
        new: list[Any] = [1.0] * arity
        parent.append(new)
        containers.append(new)
    from equinox_like._tree.cycles import check_no_cycle

    check_no_cycle("tree", containers[0])
    node = data.draw(st.sampled_from(containers))
    ancestors = [x for x in containers if contains(x, node)]
    node.append(data.draw(st.sampled_from(ancestors)))
    with pytest.raises(ValueError, match="contains itself") as caught:
        check_no_cycle("tree", containers[0])
    _, above, _, below, _ = str(caught.value).split("`")
    assert eval(above, {"tree": containers[0]}) is eval(below, {"tree": containers[0]})
    assert below.startswith(above)


def contains(outer: Any, inner: Any) -> bool:
    return outer is inner or (
        isinstance(outer, list) and any(contains(x, inner) for x in outer)
    )
