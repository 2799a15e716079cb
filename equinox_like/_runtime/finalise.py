"""Programs for export: `finalise_fn` and its relatives, and `to_onnx`.

The library's own primitives are replaced by those of JAX. A jaxpr is run equation by
equation. If the primitive of an equation has a replacement, the replacement is run
instead. Jaxprs in the parameters of an equation are finalised, too.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.tree_util as jtu

from .._compat.jaxpr import (
    definition,
    interpret,
    is_closed,
    is_program,
    name_and_params,
    opened,
    programs_in,
    run_equation,
    shard_mapped,
)
from .._compat.primitives import finalisations
from .._core.base import name_of
from .._core.flat_call import take_apart
from .._transforms.trace import filter_eval_shape, trace
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import path_str
from .._tree.require import named_arguments, require_callable

primitive_finalisations: Final[dict[Any, Callable[..., Any]]] = finalisations
"""From primitives to their replacements. `replacement(*arrays, **params)` must return
what `prim.bind(*arrays, **params)` would. You may add primitives of your own."""

_REMOVED: Final = "stop_gradient", "custom_jvp_call", "platform_index"


def register_impl_finalisation(prim: Any) -> None:
    """Registers a primitive's `impl` as its replacement. JAX must be able to trace it.

    !!! example

        ```python
        from equinox_like import internal as eqxi
        from jax.extend.core import Primitive

        identity_p = Primitive("my_identity")
        identity_p.def_impl(lambda x: x)
        eqxi.register_impl_finalisation(identity_p)
        assert identity_p in eqxi.primitive_finalisations
        ```
    """
    primitive_finalisations[prim] = prim.impl


def finalise_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the same without any primitive of this library.

    Of a `jax.lax.platform_dependent` the default is taken. Apply it last. Derivatives of
    the returned function may silently be wrong, because the rules of `jax.custom_jvp`
    functions and `stop_gradient` are removed.

    **Arguments:**

    - `fn`: any callable of positional arguments.

    **Returns:**

    A function of the same arguments, with the same output.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp
        from equinox_like import internal as eqxi

        def checked(x):
            return eqx.error_if(x, x < 0, "negative")

        assert "for_whole_batch" not in str(jax.make_jaxpr(eqxi.finalise_fn(checked))(1.0))
        assert eqxi.finalise_fn(checked)(jnp.ones(())) == 1
        ```
    """

    def finalised(*args):
        data, _ = take_apart(args)
        jaxpr, _, _, out_rest = trace(fn, args, {}, is_array)
        return out_rest.fill(finalise_jaxpr_as_fn(jaxpr)(*data))

    return finalised


def finalise_make_jaxpr(
    fn: Callable[..., Any], *, return_shape: bool = False
) -> Callable[..., Any]:
    """`jax.make_jaxpr` of [`equinox_like.internal.finalise_fn`][] of a function.

    !!! example

        ```python
        from equinox_like import internal as eqxi

        jaxpr = eqxi.finalise_make_jaxpr(lambda x: x + 1)(1.0)
        assert [e.primitive.name for e in jaxpr.jaxpr.eqns] == ["add"]
        ```
    """
    make: Any = jax.make_jaxpr(finalise_fn(fn), return_shape=return_shape)
    return make


def finalise_jaxpr(closed_jaxpr: Any) -> Any:
    """A closed jaxpr without any primitive of this library.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        from equinox_like import internal as eqxi

        checked = lambda x: eqx.error_if(x, x < 0, "negative")
        jaxpr = eqxi.finalise_jaxpr(jax.make_jaxpr(checked)(1.0))
        assert "for_whole_batch" not in str(jaxpr)
        ```
    """
    jaxpr, _ = opened(closed_jaxpr)
    make: Any = jax.make_jaxpr(finalise_jaxpr_as_fn(closed_jaxpr))
    # The types as they are: an input may be a mutable array, or sharded explicitly.
    return make(*(v.aval for v in jaxpr.invars))


def finalise_jaxpr_as_fn(closed_jaxpr: Any) -> Callable[..., list[Any]]:
    """A function that runs the jaxpr without any primitive of this library.

    It takes arrays, and returns a list of arrays.

    !!! example

        ```python
        import jax
        from equinox_like import internal as eqxi

        f = eqxi.finalise_jaxpr_as_fn(jax.make_jaxpr(lambda x: x + 1)(1.0))
        assert f(2.0) == [3.0]
        ```
    """
    jaxpr, consts = opened(closed_jaxpr)
    return lambda *args: finalise_eval_jaxpr(jaxpr, consts, *args)


def finalise_eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Runs an open jaxpr with its constants, without any primitive of this library.

    !!! example

        ```python
        import jax
        from equinox_like import internal as eqxi

        closed = jax.make_jaxpr(lambda x: x + 1)(1.0)
        assert eqxi.finalise_eval_jaxpr(closed.jaxpr, closed.consts, 2.0) == [3.0]
        ```
    """
    return interpret(jaxpr, consts, args, functools.partial(_run, jaxpr))


def _run(jaxpr: Any, equation: Any, args: list[Any]) -> Sequence[Any]:
    name, params = name_and_params(equation)
    if name == "stop_gradient":
        return args
    if name == "platform_index" and None in params["platforms"]:
        return [params["platforms"].index(None)]
    if name == "cond" and isinstance(args[0], int):
        return finalise_jaxpr_as_fn(params["branches"][args[0]])(*args[1:])
    if name == "custom_jvp_call":
        return finalise_jaxpr_as_fn(params["call_jaxpr"])(*args)
    replacement = primitive_finalisations.get(equation.primitive)
    if replacement is not None:
        return _run_replacement(equation, replacement, args)
    programs = {k: v for k, v in params.items() if _needs_finalising(v)}
    if not programs:
        return run_equation(jaxpr, equation, args)
    if (replacement := definition(equation)) is not None:
        return _run_replacement(equation, replacement, args)
    if name == "remat2" and not is_closed(programs["jaxpr"]):
        # An open jaxpr cannot hold new constants, so the checkpoint is inlined. It is
        # not needed, because a finalised program is not differentiated.
        return finalise_eval_jaxpr(programs["jaxpr"], (), *args)
    if name == "shard_map":
        # Its program is finalised within the map, where the mesh axes have their names.
        body = finalise_jaxpr_as_fn(programs["jaxpr"])
        return shard_mapped(body, params, [*params["out_specs"]])(*args)
    changed = jax.tree.map(
        lambda x: finalise_jaxpr(x) if is_program(x) else x,
        programs,
        is_leaf=is_program,
    )
    new = equation.replace(params={**equation.params, **changed})
    return run_equation(jaxpr, new, args)


def _run_replacement(equation, replacement, args) -> list[Any]:
    """Runs a replacement, and finalises the primitives that it uses."""

    def flat(*args):
        out = replacement(*args, **equation.params)
        return out if equation.primitive.multiple_results else [out]

    return finalise_jaxpr_as_fn(jax.make_jaxpr(flat)(*args))(*args)


def _needs_finalising(param: Any) -> bool:
    for program in programs_in({"": param}):
        for equation in opened(program)[0].eqns:
            name, params = name_and_params(equation)
            if (
                equation.primitive in primitive_finalisations
                or name in _REMOVED
                or any(map(_needs_finalising, params.values()))
            ):
                return True
    return False


def to_onnx(fun: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Converts a function to a model of [ONNX](https://onnx.ai), for programs without JAX.

    The converter is [jax2onnx](https://github.com/enpasos/jax2onnx), which
    `pip install "equinox_like[onnx]"` installs. Version 0.17.1 works with jax 0.10 and
    0.11, and for some functions with jax 0.12.

    **Arguments:**

    - `fun`: a Module or another function. Its arrays become initialisers of the model.
    - `*args`: examples of its arguments. Arrays, for which `jax.ShapeDtypeStruct`s may
        stand, become inputs of these shapes and dtypes, named by their parameters: `x`,
        `batch['image']`. All else is static.
    - `**options`: passed to `jax2onnx.to_onnx`, for example `opset=21` or
        `model_name="classifier"`.

    **Returns:**

    An `onnx.ModelProto`, which `onnx.save` writes to a file. Its outputs are the arrays of
    the output of `fun`, named `output`, `output[0]`, `output['logits']` and so on.

    **Raises:**

    `ModuleNotFoundError` if jax2onnx is not installed. `ValueError` if there is no array
    among the arguments, or in the output. `RuntimeError` if jax2onnx cannot convert the
    function.

    !!! example

        ```py
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp
        import onnx

        model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        onnx.save(eqx.to_onnx(model, jnp.ones(2)), "model.onnx")
        ```
    """
    require_callable(fun, "to_onnx")
    try:
        converter: Any = importlib.import_module("jax2onnx")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`to_onnx` needs the converter jax2onnx: `pip install jax2onnx`."
        ) from error
    inputs = [
        (path_str(path, name), jax.ShapeDtypeStruct(x.shape, x.dtype))
        for name, tree in named_arguments(fun, args, {})
        for path, x in jtu.tree_leaves_with_path(tree)
        if is_array_or_struct(x)
    ]
    _, rest = take_apart(args, is_array_or_struct)
    outputs = [
        path_str(path, "output")
        for path, x in jtu.tree_leaves_with_path(filter_eval_shape(fun, *args))
        if isinstance(x, jax.ShapeDtypeStruct)
    ]
    for names, where in ((inputs, "the arguments"), (outputs, "the output")):
        if not names:
            raise ValueError(
                f"`to_onnx`: there is no array in {where} of the function."
            )

    def flat(*arrays: Any) -> Any:
        out = fun(*rest.fill(arrays))
        return tuple(x for x in jtu.tree_leaves(out) if is_array(x))

    try:
        return converter.to_onnx(
            finalise_fn(flat),
            [struct for _, struct in inputs],
            input_names=[name for name, _ in inputs],
            output_names=outputs,
            **options,
        )
    except Exception as error:
        fix = ""
        if jax.__version_info__ >= (0, 12):
            fix = (
                " Version 0.17.1 of jax2onnx was made for jax 0.10 and 0.11: convert in "
                "an environment with `pip install 'jax<0.12' jax2onnx`. `eqx.save` and "
                "`eqx.load` carry the model there."
            )
        raise RuntimeError(
            f"jax2onnx cannot convert `{name_of(fun)}` with jax {jax.__version__}: "
            f"{type(error).__name__}: {error}.{fix}"
        ) from error


def onnx_converter(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`args -> equinox_like.to_onnx(fn, *args)`: the form in which Equinox has it.

    !!! example

        ```py
        from equinox_like import internal as eqxi

        proto = eqxi.to_onnx(model)(x)
        ```
    """
    return functools.partial(to_onnx, fn)
