"""`filter_checkpoint`: the backward pass recomputes values instead of storing them."""

import inspect
import typing
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from .._annotations import signature_of
from .._core.base import frames_hidden, require_callable
from .._core.flat_call import FlatCall, pack, unpack
from .._module.fields import field
from .._typing import NOT_GIVEN
from .arguments import WithOptions, applied, show_as_call

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")  # for jedi, as in `_jit/jit.py`


@typing.overload
def filter_checkpoint(
    fun: Callable[_P, _T],
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
) -> "Checkpointed[_P, _T]": ...
@typing.overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: Callable[..., bool] | None = None
) -> "Callable[[Callable[_P, _T]], Checkpointed[_P, _T]]": ...
def filter_checkpoint(
    fun: _F = NOT_GIVEN,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., Any] | None = None,
) -> _F:
    """`jax.checkpoint` for functions of any pytrees.

    Reverse-mode differentiation then stores only the inputs of `fun`, and computes
    everything else that the backward pass needs again. That takes less memory and more
    time.

    **Arguments:**

    - `fun`: any callable; its arguments, and what it returns, may be anything.
    - `prevent_cse`: as for `jax.checkpoint`; `False` is right within `jax.lax.scan`.
    - `policy`: one of `jax.checkpoint_policies`; which intermediate values to keep.

    **Returns:**

    A callable like `fun`, with the same values and derivatives.

    **Raises:**

    When wrapping: `TypeError` if `policy` cannot be called; `ValueError` if it is a
    function of `jax.checkpoint_policies` that makes a policy from its arguments.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        policy = jax.checkpoint_policies.dots_saveable

        @eqx.filter_checkpoint(policy=policy)
        def block(activation, x):
            return activation(jnp.sin(x))

        grad = eqx.filter_grad(lambda x: block(jnp.tanh, x))(jnp.asarray(0.0))
        assert grad == 1.0
        ```
    """
    if policy is not None:
        require_policy(policy, "filter_checkpoint", "policy")
    return applied(Checkpointed, fun, _prevent_cse=prevent_cse, _policy=policy)


class Checkpointed(WithOptions[_P, _T], Generic[_P, _T]):
    """The result of [`equinox_like.filter_checkpoint`][]."""

    _transformation_ = "filter_checkpoint"

    _prevent_cse: bool = field(static=True)
    _policy: Any = field(static=True)

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        data, call = FlatCall.of(self._held_, args, kwargs, with_fun=True)

        def flat(data):
            return pack(call.run(data))

        show_as_call(flat, self.__wrapped__, args, kwargs, self._tree)
        policy: Any = self._policy
        flat = jax.checkpoint(flat, prevent_cse=self._prevent_cse, policy=policy)
        return unpack(flat(data))


def checkpointed_step(
    step: Callable[..., Any], policy: Any, unroll: int | bool, length: int
) -> Callable[..., Any]:
    """The step of a `jax.lax.scan`, under `jax.checkpoint` with this policy.

    `policy` may be `None` for none, or `True` to compute everything again.
    """
    if policy is None or policy is False:
        return step
    # A loop keeps XLA from merging the steps of the backward pass with those of the
    # forward pass, which would store everything after all. Unrolled, there is no loop.
    is_unrolled = unroll is True or unroll >= length
    policy = None if policy is True else policy
    return jax.checkpoint(step, prevent_cse=is_unrolled, policy=policy)


def require_policy(policy: Any, function: str, argument: str) -> None:
    """Raises unless `policy` is a function that JAX can ask what to save."""
    policies: Any = jax.checkpoint_policies
    if isinstance(policy, str):
        raise TypeError(
            f"`{function}` takes a function as `{argument}`: pass "
            f"`jax.checkpoint_policies.{policy}` instead of its name."
        )
    require_callable(policy, function, argument)
    name: str = getattr(policy, "__name__", "")
    if policy is not getattr(policies, name, None):
        return
    # A policy is called with the parameters of any primitive, so it takes `**kwargs`.
    kinds = {p.kind for p in signature_of(policy).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"`{function}`: `jax.checkpoint_policies.{name}` makes a policy from its "
            f"arguments. Pass what `jax.checkpoint_policies.{name}(...)` returns as "
            f"`{argument}`."
        )
