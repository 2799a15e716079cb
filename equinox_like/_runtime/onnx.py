"""`to_onnx`: a function as an ONNX model, by the converter jax2onnx."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from .._core.base import name_of
from .._core.flat_call import take_apart
from .._transforms.trace import filter_eval_shape
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import path_str
from .._tree.require import named_arguments, require_callable
from .finalise import finalise_fn


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
