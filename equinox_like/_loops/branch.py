"""`filter_cond` and `filter_switch`: one of several functions, chosen at run time."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._call_path import call_rebuilt
from .._core.base import frames_hidden, require_callable
from .._core.difference import ARRAY_TYPE, Leaf, tree_differences
from .._core.flat_call import Template, pack, take_apart, unpack
from .._transforms.arguments import show_as_call
from .._tree.filters import is_array, is_array_like, is_number
from .._tree.nodes import describe_node
from .._tree.strict import strictly_same
from .carry import jax_type, of_mesh
from .eager import run_cached

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@frames_hidden
def filter_cond(
    pred: Any,
    true_fun: Callable[[*_Args], _T],
    false_fun: Callable[[*_Args], _T],
    *args: *_Args,
) -> _T:
    """`jax.lax.cond` for functions of any pytrees.

    **Arguments:**

    - `pred`: a boolean scalar.
    - `true_fun`, `false_fun`: the functions to call if it is true, and if it is false.
        Both are traced.
    - `*args`: the arguments of the functions.

    **Returns:**

    What the chosen function returns. A number becomes an array where the other function
    returns another number, or an array, of the same dtype. Everything else that is not
    an array must be the same in both outputs.

    **Raises:**

    `TypeError` if `pred` is not a scalar, or if the two outputs differ in structure,
    shape, dtype or static values, naming the path.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        def warm_up(rate, name):
            return rate / 10, name

        def full(rate, name):
            return rate, name

        step = jnp.asarray(3)
        rate, name = eqx.filter_cond(step < 5, warm_up, full, jnp.asarray(1.0), "adam")
        assert rate == 0.1 and name == "adam"
        ```
    """
    _require_scalar(pred, "filter_cond", "pred", "a boolean", "biuf")
    require_callable(true_fun, "filter_cond", "true_fun")
    require_callable(false_fun, "filter_cond", "false_fun")
    return run_cached(_filter_cond, (true_fun, false_fun), pred, args)


def _filter_cond(functions: Sequence[Any], pred: Any, args: tuple[Any, ...]) -> Any:
    named = zip(("true_fun", "false_fun"), functions, strict=True)
    return _Branches(dict(named), args).run(
        lambda functions, data: jax.lax.cond(pred, *functions, data)
    )


@frames_hidden
def filter_switch(
    index: Any, branches: Sequence[Callable[[*_Args], _T]], *args: *_Args
) -> _T:
    """`jax.lax.switch` for functions of any pytrees.

    **Arguments:**

    - `index`: an integer scalar. An array is clamped to the range, as in JAX.
    - `branches`: the functions to choose from. All of them are traced. They may be
        Modules, even of different structures.
    - `*args`: the arguments of the functions.

    **Returns:**

    What the chosen function returns, as by [`equinox_like.filter_cond`][].

    **Raises:**

    `TypeError` if `index` is not an integer scalar, or if two outputs differ in
    structure, shape, dtype or static values, naming the path. `ValueError` if there are
    no branches, or if a Python integer is out of range.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        experts = [eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.nn.Identity()]
        y = eqx.filter_switch(jnp.asarray(1), experts, jnp.ones(2))
        assert y.tolist() == [1, 1]
        ```
    """
    if not isinstance(branches, Iterable):
        raise TypeError(
            "`filter_switch` takes a sequence of functions as `branches`; got "
            f"{describe_node(branches)}."
        )
    branches = tuple(branches)  # a generator can be read only once
    if not branches:
        raise ValueError("`filter_switch`: there are no branches.")
    for i, branch in enumerate(branches):
        require_callable(branch, "filter_switch", f"branches[{i}]")
    _require_scalar(index, "filter_switch", "index", "an integer", "iu")
    if type(index) is int and not 0 <= index < len(branches):
        raise ValueError(
            f"`filter_switch`: the index {index} is out of range for {len(branches)} "
            "branches. Only an array is clamped."
        )
    return run_cached(_filter_switch, branches, index, args)


def _filter_switch(functions: Sequence[Any], index: Any, args: tuple[Any, ...]) -> Any:
    named = {f"branches[{i}]": fun for i, fun in enumerate(functions)}
    return _Branches(named, args).run(
        lambda functions, data: jax.lax.switch(index, functions, data)
    )


def _require_scalar(
    value: Any, function: str, argument: str, what: str, kinds: str
) -> None:
    """Raises for anything but a scalar whose dtype is of one of NumPy's `kinds`."""
    fix = ""
    if is_array_like(value):
        # The dtype of a PRNG key has no kind.
        kind = getattr(jnp.result_type(value), "kind", None)
        if not jnp.ndim(value) and kind in set(kinds):
            return
        if jnp.ndim(value):
            fix = " To choose for each element, use `jax.vmap` or `jnp.where`."
    raise TypeError(
        f"`{function}`: `{argument}` must be {what} scalar; got "
        f"{describe_node(value)}.{fix}"
    )


class _Branches:
    """Functions of the same arguments; JAX runs one of them."""

    def __init__(self, functions: dict[str, Any], args: tuple[Any, ...]):
        self._functions = functions
        self._args = args
        self._data, self._template = take_apart(args)
        # Each output, with a `Leaf` in place of each array, since a tracer that is kept
        # here would leak.
        self._outputs: dict[str, Template] = {}
        # The indices of output leaves that are numbers and must become arrays.
        self._numbers: list[int] = []

    def run(self, choose: Callable[[list[Any], list[Any]], Any]) -> Any:
        while True:
            flat = list(map(self._flat, self._functions))
            try:
                return unpack(choose(flat, self._data))
            except TypeError:
                if self._numbers or not (numbers := self._differing_numbers()):
                    self._raise_clearer()
                    raise
                self._numbers = numbers

    def _flat(self, name: str) -> Callable[[list[Any]], Any]:
        def flat(data):
            out = call_rebuilt(self._functions[name], *self._template.fill(data))
            leaves, treedef = jtu.tree_flatten(out)
            for i in self._numbers:
                leaves[i] = jnp.asarray(leaves[i])
            described = [
                Leaf("data", jax_type(x)) if is_array(x) else x for x in leaves
            ]
            self._outputs[name] = Template(treedef, described, ())
            return pack(treedef.unflatten(leaves))

        return show_as_call(flat, self._functions[name], self._args)

    def _differing_numbers(self) -> list[int]:
        """The indices of leaves that are a number in one branch's output, and an array
        or another number in another branch's output."""
        outputs = self._outputs.values()
        if len({out.treedef for out in outputs}) != 1 or not self._is_traced():
            return []
        columns = zip(*(out.leaves for out in outputs), strict=True)
        return [i for i, column in enumerate(columns) if _may_become_array(column)]

    def _is_traced(self) -> bool:
        return len(self._outputs) == len(self._functions)

    def _raise_clearer(self) -> None:
        """Raises a `TypeError` that names the leaf, if the branches' outputs differ."""
        if not self._is_traced():
            return
        try:
            (name, first), *others = [
                (name, out.fill(())) for name, out in self._outputs.items()
            ]
        except Exception:
            return  # A user's node type may refuse placeholders as children.
        as_text = operator.attrgetter("value")
        for other, out in others:
            for found in tree_differences("output", first, out, _is_array, as_text):
                is_type = found.kind == ARRAY_TYPE
                hint = of_mesh(found.before + found.after) if is_type else ""
                raise TypeError(
                    f"The outputs of `{name}` and `{other}` may differ only in the "
                    f"values of arrays: `{found.path}` is {found.before} in the first, "
                    f"but {found.after} in the second.{hint}"
                )


def _is_array(x: Any) -> bool:
    return isinstance(x, Leaf)


def _may_become_array(column: tuple[Any, ...]) -> bool:
    numbers = [x for x in column if is_number(x)]
    if not numbers or not all(_is_array(x) or is_number(x) for x in column):
        return False
    return len(numbers) < len(column) or not all(
        strictly_same(x, numbers[0]) for x in numbers
    )
