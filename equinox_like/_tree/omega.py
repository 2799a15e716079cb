"""`ω`: arithmetic of whole trees, leaf by leaf."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .filters import is_number
from .nodes import with_article

_Operator = Callable[[Any, Any], Any]


class _Wraps(type):
    """Metaclass of `ω`, which makes `tree**ω` the same as `ω(tree)`."""

    __array_ufunc__ = None  # NumPy leaves `array**ω` to this class

    def __rpow__(cls, value: Any) -> Any:
        return cls(value)


def _binary(function: _Operator) -> Callable[["ω", Any], "ω"]:
    return lambda self, other: self._with(function, other)


def _reflected(function: _Operator) -> Callable[["ω", Any], "ω"]:
    return lambda self, other: self._with(lambda x, y: function(y, x), other)


def _unary(function: Callable[[Any], Any]) -> Callable[["ω"], "ω"]:
    return lambda self: self.call(function)


class ω(metaclass=_Wraps):
    """Arithmetic of whole trees, leaf by leaf.

    `(ω(a) + ω(b)).ω` is `jax.tree.map(operator.add, a, b)`. `a**ω` is another way to write
    `ω(a)`. The operators `+ - * @ / // % ** << >> & ^ |`, the comparisons, and the unary
    `- + abs ~` apply to each leaf. The other operand is another `ω`, or a Python number
    or JAX array, which is used for all leaves.

    `w[index]` indexes each leaf, and `w.call(function)` calls `function` with each
    leaf. `w.at[index].set(other)` works as for JAX arrays, and so do `add`, `multiply`,
    `divide`, `power`, `min` and `max`.

    **Arguments:**

    - `value`: any pytree.
    - `is_leaf`: as for `jax.tree.map`. Results of operators have the same `is_leaf`.

    **Attributes:**

    - `ω`: the tree.
    - `is_leaf`: as given.

    **Raises:**

    By an operator: `ValueError` if the two trees have different structures, or an `is_leaf`
    with different code. `RuntimeError` if the other operand is something else, such as a
    NumPy array or a tree that is not wrapped.

    !!! example

        ```python
        import jax.numpy as jnp
        from equinox_like.internal import ω

        y = {"a": jnp.ones(2), "b": jnp.zeros(())}
        slope = {"a": jnp.ones(2), "b": jnp.ones(())}
        step = (y**ω + 0.5 * slope**ω).ω
        assert step["a"].tolist() == [1.5, 1.5] and step["b"] == 0.5
        ```
    """

    __array_ufunc__ = None  # NumPy leaves the operators to this class

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool] | None = None):
        self._value = value
        self.is_leaf = is_leaf

    @property
    def ω(self) -> Any:
        return self._value

    @property
    def at(self) -> "_At":
        return _At(self)

    def call(self, function: Callable[[Any], Any]) -> "ω":
        """The tree with `function(leaf)` for each leaf."""
        value = jtu.tree_map(function, self._value, is_leaf=self.is_leaf)
        return type(self)(value, self.is_leaf)

    def __getitem__(self, index: Any) -> "ω":
        return self.call(lambda x: x[index])

    def _with(self, function: _Operator, other: Any) -> "ω":
        if isinstance(other, ω):
            return self._with_tree(function, other)
        if is_number(other) or isinstance(other, jax.Array):
            return self.call(lambda x: function(x, other))
        raise RuntimeError(
            "The other operand of `ω` must be another `ω`, a Python number or a JAX "
            f"array; got {with_article(type(other).__name__)}. Wrap a tree with "
            "`ω(tree)`, and convert a NumPy array with `jnp.asarray`."
        )

    def _with_tree(self, function: _Operator, other: "ω") -> "ω":
        if _key_of_code(self.is_leaf) != _key_of_code(other.is_leaf):
            raise ValueError("The two operands of `ω` must have the same `is_leaf`.")
        ours = jtu.tree_structure(self._value, self.is_leaf)
        theirs = jtu.tree_structure(other._value, self.is_leaf)
        if ours != theirs:
            raise ValueError(
                "The two operands of `ω` must have the same structure; got\n    "
                f"{ours}\nand\n    {theirs}"
            )
        value = jtu.tree_map(function, self._value, other._value, is_leaf=self.is_leaf)
        return type(self)(value, self.is_leaf)

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)

    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    # Comparisons return a tree, as comparisons of arrays return an array.
    __eq__: Any = _binary(operator.eq)
    __ne__: Any = _binary(operator.ne)
    __hash__ = object.__hash__

    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)

    __iter__ = None  # otherwise `for` would call `__getitem__` with 0, 1, ... for ever

    def __bool__(self) -> bool:
        raise TypeError(
            "An `ω` is a whole tree, which is neither true nor false. Inspect its "
            "leaves, which are those of `.ω`."
        )

    def __repr__(self) -> str:
        return f"ω({self._value!r})"


class _At:
    """`w.at`, to be indexed."""

    def __init__(self, wrapped: ω):
        self._wrapped = wrapped

    def __getitem__(self, index: Any) -> "_AtIndex":
        return _AtIndex(self._wrapped, index)


def _updating(name: str) -> Callable[["_AtIndex", Any], ω]:
    return lambda self, other: self.update(name, other)


class _AtIndex:
    """`w.at[index]`, with the methods that update there."""

    def __init__(self, wrapped: ω, index: Any):
        self._wrapped = wrapped
        self._index = index

    def update(self, name: str, other: Any) -> ω:
        def update(x, y):
            return getattr(jnp.asarray(x).at[self._index], name)(y)

        return self._wrapped._with(update, other)

    set, add = _updating("set"), _updating("add")
    multiply, divide = _updating("multiply"), _updating("divide")
    power, min, max = _updating("power"), _updating("min"), _updating("max")


def _key_of_code(function: Any) -> Any:
    """A key that is equal for functions with the same code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    return code.co_code, code.co_consts, code.co_names
