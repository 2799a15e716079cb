"""Training or inference, as a context. A layer whose own flag is `None` obeys it."""

from typing import Final, TypeVar

from .._module import Module
from .._tree.nodes import describe_node
from .context import Context, Entering

_Flag = TypeVar("_Flag")

_inference: Final[Context[bool]] = Context(False, name="inference")


def inference() -> Entering:
    """A context in which layers with the flag `inference=None` are in inference mode.

    Layers are constructed with the flag `False`. To have them follow the context, use
    `nn.inference_mode(model, None)`, or construct them with `inference=None`. A flag
    that is `True` or `False` takes precedence over the context, and so does the
    argument of a call.

    **Returns:**

    A context manager, which decorates functions, too. See [`equinox_like.Context`][]:
    compiled functions are retraced once, and each thread has its own.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.inference_mode(eqx.nn.Dropout(0.5), None)
        x = jnp.ones(3)
        dropped = model(x, key=jax.random.key(0))
        with eqx.inference():
            assert model(x) is x
        ```
    """
    return _inference(True)


def training() -> Entering:
    """A context in which layers with the flag `inference=None` are in training mode.

    That is the default, so this is only needed within [`equinox_like.inference`][].

    **Returns:**

    A context manager, which decorates functions, too.

    !!! example

        ```python
        import equinox_like as eqx

        with eqx.inference():
            with eqx.training():
                assert not eqx.is_inference()
            assert eqx.is_inference()
        ```
    """
    return _inference(False)


def is_inference(*flags: _Flag | None) -> _Flag | bool:
    """Whether a layer should run in inference mode. Call it in layers that you write.

    **Arguments:**

    - `*flags`: flags that take precedence over the context if they are not `None`, in
        this order. Usually the argument of the call, and then the field of the layer.

    **Returns:**

    The first flag that is not `None`; else `True` within [`equinox_like.inference`][], and
    `False` otherwise.

    **Raises:**

    `TypeError` if a flag is a Module, such as the layer in place of its field.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Noise(eqx.Module):
            scale: float
            inference: bool | None = None

            def __call__(self, x, *, key=None):
                if eqx.is_inference(self.inference):
                    return x
                return x + self.scale * jax.random.normal(key, x.shape)

        with eqx.inference():
            assert (Noise(0.1)(jnp.ones(3)) == 1).all()
        ```
    """
    for flag in flags:
        if isinstance(flag, Module):  # every Module is true
            raise TypeError(
                "`is_inference` takes flags (`True`, `False` or `None`); got "
                f"{describe_node(flag)}. Pass its field, as in "
                "`is_inference(layer.inference)`."
            )
        if flag is not None:
            return flag
    return _inference.value
