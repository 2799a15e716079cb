"""`filter_export`: a function as bytes, for another process or another machine.

`jax.export` exports a function of a dictionary from the name of each array to the
array. The bytes also hold a description of the call (`describe.py`): static leaves are
baked into the program, so a call must pass equal ones. Loading the bytes never imports,
unpickles or executes anything in them.

They are a magic number, a checksum of the rest, the size of a header, the header in JSON,
and the program of `jax.export`.
"""

import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu

from .._annotations import signature_of
from .._compat.errors import exported_cudnn_calls, is_callback_error
from .._core.base import frames_hidden, name_of, require_callable
from .._core.describe import Table, decode, describe, encode, first_difference, stored
from .._core.difference import Leaf, trees
from .._core.flat_call import Template, take_apart
from .._tree.arrays import struct_of
from .._tree.filters import is_array, is_array_or_struct
from .._tree.nodes import describe_node
from .._tree.partitioning import map_arrays
from .checks import raise_clearer
from .jit import Jitted, filter_jit
from .layout import CallLayout, LayoutTable, Leaves, chained, data_names
from .stages import as_platforms, python_is_called

_P = ParamSpec("_P")
_T = TypeVar("_T")


def filter_export(
    fun: Callable[_P, _T],
    *,
    platforms: Sequence[str] | str | None = None,
    disabled_checks: Sequence[Any] = (),
) -> "Callable[..., Exported[_P, _T]]":
    """`jax.export.export` for functions of any pytrees: a program that can be saved.

    **Arguments:**

    - `fun`: any callable, or the result of `filter_jit`. The arrays that it holds itself,
        as a Module does, become part of the program.
    - `platforms`: the platforms to export for, for example `("cpu", "cuda")` or `"tpu"`.
        By default the platform of this host.
    - `disabled_checks`: as for `jax.export.export`.

    **Returns:**

    A function that takes the arguments of `fun`, where a `jax.ShapeDtypeStruct` may stand
    for an array, also one with symbolic dimensions. It returns the exported function, which
    is called like `fun`, by itself or under `jax.jit`, and has

    - `.serialize(vjp_order=0)`: its bytes, for [`equinox_like.deserialize_export`][]. This
        needs the package `flatbuffers`. The loaded function can be differentiated up to
        `vjp_order` times;
    - `.exported`: the `jax.export.Exported` object, a function of a dictionary of arrays,
        with the program as text, its types and its platforms.

    **Raises:**

    `ValueError` for a misspelt platform, and for attention that calls cuDNN: it says which
    `disabled_checks` to pass. `NotImplementedError` if `fun` holds a check or a callback,
    which call Python. When the result is called: `TypeError` naming the path of a static
    argument or a part of the structure that differs from what was exported; JAX's errors
    for other shapes and dtypes, and for a platform that it was not exported for.
    `.serialize` raises `ValueError` naming the path of a static value that cannot be
    described to another process.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
        exported = eqx.filter_export(model, platforms=("cpu", "tpu"))(jnp.ones(2))
        assert exported.platforms == ("cpu", "tpu")
        assert jnp.allclose(exported(jnp.ones(2)), model(jnp.ones(2)))
        ```
    """
    require_callable(fun, "filter_export")
    platforms = as_platforms(platforms, "platforms")
    jitted: Any = fun if isinstance(fun, Jitted) else filter_jit(fun)
    # A loaded program donates no buffers.
    jitted = Jitted(jitted._held_, "none", jitted._program.jitkwargs)

    @frames_hidden
    def export(*args: Any, **kwargs: Any) -> Any:
        return _export(jitted, args, kwargs, platforms, disabled_checks)

    return export


def deserialize_export(
    data: bytes | bytearray | memoryview, like: Any = None
) -> "Exported[..., Any]":
    """Loads an exported function from the bytes that its `.serialize()` returned.

    The counterpart of `jax.export.deserialize`. Loading runs no code from `data`; calling
    the result runs the program in it.

    **Arguments:**

    - `data`: the bytes.
    - `like`: a tree of the structure of the output, for example from `.eval_shape`, in
        which any arrays or `jax.ShapeDtypeStruct`s stand for the arrays. Needed only if
        the output holds anything but arrays and plain Python values in dictionaries,
        lists and tuples: no class is ever looked up by a name in the file.

    **Returns:**

    The exported function, as [`equinox_like.filter_export`][] gave it.

    **Raises:**

    `TypeError` if `data` is not bytes. `ValueError` if it is truncated, changed or not an
    exported function.
    `ValueError` naming the path if `like` is needed, or does not fit the output.

    !!! example

        ```python
        import equinox_like as eqx
        import jax
        import jax.numpy as jnp

        def scale(x, by):
            return {"x": x * by, "by": by}

        x = jax.ShapeDtypeStruct((3,), jnp.float32)
        data = eqx.filter_export(scale)(x, by=2).serialize()
        loaded = eqx.deserialize_export(data)
        assert loaded(jnp.ones(3), 2)["x"].tolist() == [2, 2, 2]
        try:
            loaded(jnp.ones(3), 3)
        except TypeError as error:
            assert "`by` was the static value 2, and is now" in str(error)
        ```
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(
            "`data` must be the bytes that `.serialize()` returned; got "
            f"{describe_node(data)}."
        )
    header, program = read(bytes(data))
    try:
        exported = jax.export.deserialize(bytearray(program))
        call = _ExportedCall(
            **{field: header[field] for field in _ExportedCall._fields}
        )
        out = decode(call.code) if like is None and type(call.code) is list else like
        loaded = Exported(exported, call, _without_data(out))
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"{NOT_OURS} ({type(e).__name__}: {e})") from e
    if like is None and type(call.code) is str:
        raise ValueError(call.code)
    if like is not None and (
        found := first_difference(call.out, describe("out", like))
    ):
        raise ValueError(f"`like` does not match the output of `{call.name}`: {found}")
    return loaded


class _ExportedCall(NamedTuple):
    """A description of the exported call, without objects of the exporting process."""

    name: str
    parameters: list[Any]  # see `_parameters_of`
    arrays: list[str]  # the names of the arrays, in the order of the signature
    arguments: Table
    out: Table
    code: Any  # the output, to be decoded; or why it cannot be


class Exported(Generic[_P, _T]):
    """An exported function; from [`equinox_like.filter_export`][].

    `exported` is JAX's own object, a function of a dictionary of arrays.
    """

    def __init__(self, exported: Any, call: _ExportedCall, output: Template):
        """`output` is that of the function, without its arrays."""
        self.exported = exported
        self._call = call
        self._output = output
        self._run = jax.jit(exported.call)
        self._layouts = LayoutTable(_signature_of(call.parameters), call.name)
        self._fitting: tuple[CallLayout | None, Any] = None, None

    @frames_hidden
    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Runs the program for arguments like those that it was exported for."""
        layout, leaves = self._layouts.fit((None, args, kwargs))
        if self._fitting != (layout, layout.static_key(leaves)):
            self._require_fit(layout, leaves)
        (group,) = layout.groups(leaves) or ((),)
        arrays = dict(zip(self._call.arrays, group, strict=True))
        try:
            data = self._run(arrays)
        except Exception as e:
            _rename(e, arrays)
            raise_clearer(e, layout, leaves)
            raise
        return self._output.fill(data)

    call = __call__

    def serialize(self, vjp_order: int = 0) -> bytes:
        """The bytes, for [`equinox_like.deserialize_export`][]."""
        call = self._call
        described = {"arguments": stored(call.arguments), "out": stored(call.out)}
        try:
            program = bytes(self.exported.serialize(vjp_order=vjp_order))
        except ImportError as e:
            raise ImportError(
                "Serialising an exported function needs the package `flatbuffers`: "
                "`pip install flatbuffers`."
            ) from e
        return write(call._asdict() | described, program)

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that the function was exported for."""
        return tuple(self.exported.platforms)

    def __repr__(self) -> str:
        return f"<{self._call.name}, exported for {', '.join(self.platforms)}>"

    def _require_fit(self, layout: CallLayout, leaves: Leaves) -> None:
        """Raises unless the structure and static leaves are those exported for."""
        given = _describe_arguments(layout, leaves)
        found = first_difference(self._call.arguments, given)
        if found is not None:
            raise TypeError(
                f"{self!r} was called with arguments other than those it was exported "
                f"for: {found}"
            )
        self._fitting = layout, layout.static_key(leaves)


def _export(jitted, args, kwargs, platforms, disabled_checks) -> Exported:
    prepared = jitted._program.prepare((jitted._tree, args, kwargs))
    specialization, layout, leaves = prepared
    groups = layout.groups(leaves)
    data, count = chained(groups), layout.number_of_own_data
    own, given = data[:count], data[count:]
    names = data_names(layout.arguments, layout)[count:]
    returned = []

    def traced(arrays):
        values = iter([*own, *(arrays[name] for name in names)])
        parts = [tuple(next(values) for _ in group) for group in groups]
        out = specialization.output(specialization.function(*parts))
        # A symbolic dimension becomes an array, whose value each call knows.
        is_dim = jax.export.is_symbolic_dim
        out = jtu.tree_map(lambda x: jnp.asarray(x) if is_dim(x) else x, out)
        returned.append(map_arrays(struct_of, out))
        return [x for x in jtu.tree_leaves(out) if is_array(x)]

    traced.__name__ = traced.__qualname__ = name_of(jitted.__wrapped__)
    try:
        exported = jax.export.export(
            jax.jit(traced), platforms=platforms, disabled_checks=disabled_checks
        )(dict(zip(names, given, strict=True)))
    except Exception as e:
        if calls := exported_cudnn_calls(e):
            raise ValueError(
                f"`filter_export`: the attention of `{traced.__name__}` calls cuDNN, and "
                "JAX does not guarantee that another version can run this call. Use "
                "another `implementation` than 'cudnn' and 'auto'; or accept that, with "
                "`disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for "
                f"name in {calls}]`."
            ) from e
        if not is_callback_error(e):
            specialization.fail(e, layout, leaves)
        raise python_is_called(
            f"`filter_export`: `{traced.__name__}`",
            "another process does not have that function",
        ) from e
    out = returned[-1]
    try:
        code = encode("out", out)
    except ValueError as e:
        code = str(e)
    call = _ExportedCall(
        name_of(jitted.__wrapped__),
        _parameters_of(signature_of(jitted.__wrapped__)),
        names,
        _describe_arguments(layout, leaves),
        describe("out", out),
        code,
    )
    return Exported(exported, call, _without_data(out))


def _rename(error: Exception, names: Iterable[str]) -> None:
    """Raises JAX's error with its dictionary lookups replaced by the arrays' names."""
    text = str(error)
    for name in names:
        text = text.replace(f"args[0][{name!r}]", f"`{name}`")
    if isinstance(error, ValueError) and text != str(error):
        raise ValueError(text) from error


def _without_data(out: Any) -> Template:
    _, rest = take_apart(out, lambda x: is_array_or_struct(x) or isinstance(x, Leaf))
    return rest


def _describe_arguments(layout: CallLayout, leaves: Leaves) -> Table:
    _, *arguments = trees(layout.arguments, layout.skeleton(leaves))
    table: Table = {}
    for name, tree in arguments:
        table |= describe(name, tree)
    return table


def _parameters_of(signature: inspect.Signature) -> list[Any]:
    """Name, kind and whether there is a default, of each parameter."""
    return [
        [p.name, p.kind.name, p.default is not p.empty]
        for p in signature.parameters.values()
    ]


def _signature_of(parameters: Any) -> inspect.Signature:
    """A signature to bind arguments to. Of a default, only its existence is kept."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=None if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default in parameters
        ]
    )


_MAGIC: Final = b"\x93EXPORT\x02"
NOT_OURS: Final = "These bytes are not an exported function, or are truncated"


def write(header: dict[str, Any], program: bytes) -> bytes:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + program
    return _MAGIC + zlib.crc32(content).to_bytes(4, "little") + content


def read(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the program; raises if the bytes are truncated or corrupted."""
    start = len(_MAGIC) + 4
    checksum, content = data[len(_MAGIC) : start], data[start:]
    if not data.startswith(_MAGIC):
        raise ValueError(f"{NOT_OURS}.")
    if zlib.crc32(content) != int.from_bytes(checksum, "little"):
        raise ValueError(f"{NOT_OURS}: the checksum does not match.")
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        return json.loads(content[8:end]), content[end:]
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{NOT_OURS}: {e}") from e
