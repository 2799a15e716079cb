"""`field`: the settings of a Module's field, beyond its name and type.

The settings are stored in the dataclass field's metadata, so a plain
`dataclasses.field(metadata=...)` can set them, too.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

_CONVERTER = "converter"
_STATIC = "static"
_TRAINABLE = "trainable"


def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    trainable: bool = True,
    **kwargs: Any,
) -> Any:
    """Describes one field of a [`equinox_like.Module`][].

    **Arguments:**

    - `converter`: called with the value once construction has set it; its result
        replaces the value. For example `jnp.asarray`.
    - `static`: whether the field is part of the structure of the tree, and not a leaf.
        Another value then makes `jax.jit` recompile. Do not put JAX arrays into a static
        field. NumPy arrays and containers such as lists and dictionaries are copied, so
        that nothing changes them later.
    - `trainable`: whether the arrays in the field are parameters. If not, they are never
        differentiated: see [`equinox_like.trainable`][].
    - `**kwargs`: as for `dataclasses.field` (`default`, `default_factory`, `init`,
        `repr`, `kw_only`, `metadata`, ...).

    **Raises:**

    `ValueError` if `metadata` already has `"converter"`, `"static"` or `"trainable"`;
    `TypeError` if the converter is not callable.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        class Scale(eqx.Module):
            factor: jax.Array = eqx.field(converter=jnp.asarray)
            name: str = eqx.field(static=True, default="scale")

        assert jax.tree.leaves(Scale(2.0)) == [2.0]
        ```
    """
    metadata = dict(kwargs.pop("metadata", None) or {})
    for reserved in (_CONVERTER, _STATIC, _TRAINABLE):
        if reserved in metadata:
            raise ValueError(
                f"`field(metadata=...)` cannot have the key {reserved!r}: pass "
                f"`{reserved}=` to `field` itself."
            )
    if converter is not None:
        if not callable(converter):
            raise TypeError(
                f"`field(converter=...)` must be callable; got {converter!r}."
            )
        metadata[_CONVERTER] = converter
    if static:
        metadata[_STATIC] = True
    if not trainable:
        metadata[_TRAINABLE] = False
    return dataclasses.field(metadata=metadata, **kwargs)


def is_static(f: dataclasses.Field) -> bool:
    return bool(f.metadata.get(_STATIC, False))


def is_trainable(f: dataclasses.Field) -> bool:
    return bool(f.metadata.get(_TRAINABLE, True))


def converter_of(f: dataclasses.Field) -> Callable[[Any], Any] | None:
    return f.metadata.get(_CONVERTER)
