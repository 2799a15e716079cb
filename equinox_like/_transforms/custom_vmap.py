"""`filter_custom_vmap`: a function with a batching rule given by the user.

The function is traced first, so that the arrays it closes over become inputs of the
flat function that JAX gets. The user's rule does not see these inputs. If one of them
is batched, the function is batched by `jax.vmap` instead.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap

from .._compat.jaxpr import eval_jaxpr
from .._core.base import by_position, frames_hidden, name_of, require_callable
from .._core.difference import tree_differences
from .._core.flat_call import Template, as_arrays, pair_of, take_apart, take_apart_like
from .._tree.filters import is_array_or_struct
from .._tree.match import leaf_name, spread
from .._tree.nodes import path_str
from .custom_jvp import WithRules, filter_custom_jvp
from .jvp_vjp import filter_jvp
from .trace import trace

_P = ParamSpec("_P")
_T = TypeVar("_T")


def filter_custom_vmap(fun: Callable[_P, _T]) -> "CustomVmap[_P, _T]":
    """A function with a custom rule for `vmap`.

    Attach the rule by `.def_vmap(rule)`; without one the function is batched like any
    other.

    **Arguments:**

    - `fun`: takes and returns anything.

    The rule is `rule(axis_size, in_batched, *args) -> (out, out_batched)`. Arrays that
    are batched have the batch along axis 0. `in_batched` is like `args`, with `True`
    for each array that is, and `False` for everything else. `out_batched` is the same for
    `out`, and may be a prefix tree. Arguments passed by keyword are passed to the rule by
    position; keyword-only arguments are passed by keyword.

    **Returns:**

    A callable like `fun`. Derivatives are those of `fun`, batched by JAX. If an array
    that `fun` closes over or holds is batched, or a keyword-only argument, the rule is
    not called, and JAX batches `fun`.

    **Raises:**

    `ValueError` if the rule returns another tree, shape or dtype than the function, or if
    an output is not batched as `out_batched` says, naming the path. `TypeError` if it
    does not return a pair.

    !!! example

        ```python
        import equinox_like as eqx
        import jax.numpy as jnp

        @eqx.filter_custom_vmap
        def solve(matrix, vector):
            return jnp.linalg.solve(matrix, vector)

        @solve.def_vmap
        def rule(axis_size, in_batched, matrix, vector):
            if in_batched == (False, True):  # one factorisation for all of them
                return jnp.linalg.solve(matrix, vector.T).T, True
            return eqx.filter_vmap(
                jnp.linalg.solve, in_axes=tuple(0 if b else None for b in in_batched)
            )(matrix, vector), True

        call = eqx.filter_vmap(solve, in_axes=(None, 0))
        assert call(2 * jnp.eye(2), jnp.ones((3, 2))).tolist() == [[0.5, 0.5]] * 3
        ```
    """
    return CustomVmap(fun)


class CustomVmap(WithRules[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_custom_vmap`][]."""

    _transformation_ = "filter_custom_vmap"

    def __init__(self, fun: Any):
        super().__init__(fun)

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Attaches the rule, and returns it."""
        require_callable(rule, "def_vmap", "rule")
        self._rules.vmap = rule
        return rule

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        fun, rule = self.__wrapped__, self._rules.vmap
        if rule is None:
            return fun(*args, **kwargs)
        placed, named = by_position(fun, args, kwargs)
        jaxpr, structs, template, out_template = trace(
            lambda *args: fun(*args, **named), placed, {}
        )
        data, _ = take_apart(placed)
        where = f"The rule of `filter_custom_vmap` of `{name_of(fun)}`"
        expected = _Expected(where, out_template, structs)

        def plain(consts, data):
            return eval_jaxpr(jaxpr.jaxpr, consts, *data)

        def flat_rule(axis_size, in_batched, consts, data):
            consts_batched, data_batched = in_batched
            if any(consts_batched):
                axes = [[0 if b else None for b in group] for group in in_batched]
                mapped = jax.vmap(plain, in_axes=axes, axis_size=axis_size)
                return mapped(consts, data), [True] * len(structs)
            flags, _ = template.fill(data_batched, lambda _: False)
            args, _ = template.fill(as_arrays(data))
            return expected.check(axis_size, rule(axis_size, flags, *args, **named))

        # JAX's `custom_vmap` has no reverse mode; the custom jvp adds it.
        batching = custom_vmap(plain)
        batching.def_vmap(flat_rule)
        flat = filter_custom_jvp(batching)
        flat.def_jvp(lambda primals, tangents: filter_jvp(plain, primals, tangents))
        return out_template.fill(flat(jaxpr.consts, data))


class _Expected(NamedTuple):
    """What a rule must return: the function's output, batched or not."""

    where: str
    template: Template
    structs: Sequence[jax.ShapeDtypeStruct]

    def check(self, axis_size: int, returned: Any) -> tuple[list[Any], list[bool]]:
        """The arrays that a rule returned, and whether each is batched.

        **Raises:**

        `ValueError` if the rule's output does not match the function's output;
        `TypeError` if it is not a pair.
        """
        out, out_batched = pair_of(returned, self.where, "(out, out_batched)")
        data, template = take_apart_like(out, self.template)
        if template != self.template:
            expected = self.template.fill(self.structs)
            found = next(
                tree_differences("out", expected, out, is_array_or_struct), None
            )
            raise ValueError(
                f"{self.where} must return the same output as the function, except "
                "for the values of arrays. "
                + (
                    f"`{found.path}` is {found.before} from the function, but "
                    f"{found.after} from the rule."
                    if found
                    else "The structures differ."
                )
            )
        data = as_arrays(data)
        all_flags = self._spread(out_batched, out)
        flags = [all_flags[i] for i in template.places]
        paths = [path for path, _ in jtu.tree_leaves_with_path(out)]
        for i, x, struct, flag in zip(
            template.places, data, self.structs, flags, strict=True
        ):
            self._check_leaf(path_str(paths[i], "out"), x, struct, flag, axis_size)
        return data, flags

    def _spread(self, out_batched: Any, out: Any) -> list[bool]:
        """The flag of `out_batched` for each leaf of `out`."""
        try:
            flags = [*spread(out_batched, out, "out_batched", "out", is_leaf=None)]
        except ValueError as e:
            raise ValueError(
                f"{self.where} must return `out_batched` like `out`, or a prefix tree of "
                f"it: {e}"
            ) from None
        for number, flag in flags:
            if not isinstance(flag, bool):
                raise ValueError(
                    f"{self.where} must say by `True` or `False` what is batched; "
                    f"`{leaf_name(out_batched, number, 'out_batched')}` is {flag!r}."
                )
        return [flag for _, flag in flags]

    def _check_leaf(
        self, name: str, x: Any, struct: Any, flag: bool, axis_size: int
    ) -> None:
        shape = (axis_size, *struct.shape) if flag else struct.shape
        if x.shape == shape and x.dtype == struct.dtype:
            return
        says = f"batched, with {axis_size} along axis 0" if flag else "not batched"
        raise ValueError(
            f"{self.where} says that `{name}` is {says}: then it must be "
            f"{struct.dtype}{list(shape)}, since the function returns "
            f"{struct.dtype}{list(struct.shape)}. It is {x.dtype}{list(x.shape)}."
        )
