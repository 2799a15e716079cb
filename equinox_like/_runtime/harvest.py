"""Marks intermediate values of a program, and collects them from its jaxpr.

A value is marked by an identity primitive, whose static parameters name the value. The
function is traced, and its jaxpr is run equation by equation. A mark yields a value. An
equation whose inner jaxpr has marks is run with additional outputs. All other equations
are run unchanged.

A function with custom rules, such as `jax.custom_vjp`, is run unchanged, and a second
time without its rules to get its marked values. Their derivatives are then those of the
plain computation. The compiler merges the two equal computations.

A watched Module, whose call also marks or replaces a value, is an instance of a subclass
of its class, with the same fields and methods. So code that reads its attributes, or checks
its class, works as before.

For `nn.summary` the model is only traced. Its watched Modules also enter a named scope. JAX
notes the scopes around each equation of a jaxpr, also under `jax.vmap` and in derivatives,
so an equation tells which Modules it belongs to."""

import collections
import contextlib
import functools
import math
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._compat.jaxpr import (
    interpret,
    mapped_axes,
    name_and_params,
    opened,
    programs_in,
    programs_on_one_platform,
    run_equation,
    scan_sizes,
    scopes_of,
    shard_mapped,
)
from .._compat.primitives import identity
from .._core.flat_call import Template, take_apart
from .._errors import ShapeError
from .._module.construct import filled
from .._module.fields import field
from .._module.freezing import Frozen
from .._module.module import BoundMethod, Function, Module
from .._transforms.trace import trace
from .._tree.arrays import describe_array
from .._tree.filters import is_array
from .._tree.match import pair_leaves
from .._tree.nodes import children_of, path_str, path_within
from .._tree.require import check_not_class, require_callable


class Mark(NamedTuple):
    """Names a marked value: by a Module's path, or by the name given to `tag`."""

    path: str
    # The nesting depth of the `capture` that marked the Module; `None` for a `tag`.
    depth: int | None


class Found(NamedTuple):
    """A marked value: its arrays, and its structure with static leaves."""

    mark: Mark
    rest: Template
    arrays: list[Any]


def marked(value: Any, mark: Mark) -> Any:
    """An equal tree, which `harvest` finds under `mark`."""
    arrays, rest = take_apart(value)
    return rest.fill(mark_p.bind(*arrays, mark=mark, rest=rest))


def _batch(arrays, axes, **params: Any) -> tuple[list[Any], list[Any]]:
    """Moves the batch axis to the front; found values have the outermost one first."""
    first = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    out = mark_p.bind(*first, **params)
    return out, [None if axis is None else 0 for axis in axes]


mark_p: Final[Any] = identity("mark", batch=_batch)


def harvest(
    fun: Callable[..., Any], is_wanted: Callable[[Mark], bool], *args: Any
) -> tuple[Any, list[Found]]:
    """The output of `fun(*args)`, and the values with a wanted mark, in order."""
    # The arguments are constants of the jaxpr. If they were its inputs, custom
    # derivative rules that close over them, as over the weights of a layer, would hold
    # their tracers and be called after this trace has ended.
    jaxpr, _, _, out_rest = trace(lambda: fun(*args), (), {})
    out, found = _run(jaxpr, (), is_wanted)
    return out_rest.fill(out), found


def marks_of(fun: Callable[..., Any], *args: Any) -> list[Mark]:
    """All marks within `fun(*args)`, which is only traced."""
    jaxpr, _ = opened(jax.make_jaxpr(lambda: take_apart(fun(*args))[0])())
    return list(_marks(jaxpr))


def _run(
    program: Any, args: Sequence[Any], is_wanted: Callable[[Mark], bool]
) -> tuple[list[Any], list[Found]]:
    """The outputs of a program, and the values found."""
    found: list[Found] = []
    jaxpr, consts = opened(program)

    def run(equation, inputs):
        out, more = _run_equation(jaxpr, equation, inputs, is_wanted)
        found.extend(more)
        return out

    return interpret(jaxpr, consts, args, run), found


def _run_equation(
    jaxpr: Any, equation: Any, inputs: list[Any], is_wanted: Callable[[Mark], bool]
) -> tuple[Sequence[Any], list[Found]]:
    name, params = name_and_params(equation)
    if equation.primitive is mark_p and is_wanted(params["mark"]):
        return inputs, [Found(params["mark"], params["rest"], inputs)]
    mark = next(filter(is_wanted, _marks_within(equation)), None)
    if mark is None:
        return run_equation(jaxpr, equation, inputs), []
    if name in _WITH_RULES:
        out = run_equation(jaxpr, equation, inputs)
        return out, _run(params[_WITH_RULES[name]], inputs, is_wanted)[1]
    if name not in _RULES:
        raise RuntimeError(
            f"`capture` cannot return `{mark.path or '<root>'}`: it is computed within "
            f"`{name}`. Leave it out of `where`; or use `jax.numpy.where` in place of "
            "`jax.lax.cond`, `jax.lax.scan` in place of `jax.lax.while_loop`, and "
            "`checkpoint=True` in `filter_scan`."
        )
    rule, program = _RULES[name]
    found: list[Found] = []

    def run(*inputs):
        out, now = _run(params[program], inputs, is_wanted)
        # Without the tracers, which would outlive their trace.
        found[:] = [x._replace(arrays=[]) for x in now]
        return out, [x.arrays for x in now]

    out, arrays = rule(run, params, inputs)
    return out, [x._replace(arrays=a) for x, a in zip(found, arrays, strict=True)]


# For each primitive that has a program: how it is run with further outputs. `run` is a
# function from the inputs of the program to its outputs and the arrays found.


def _jit(run: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    run.__name__ = params["name"]
    out_shardings = [*params["out_shardings"]], None
    options = {"in_shardings": params["in_shardings"], "out_shardings": out_shardings}
    return jax.jit(run, **options)(*inputs)


def _checkpoint(run: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    options = {"policy": params["policy"], "prevent_cse": params["prevent_cse"]}
    return jax.checkpoint(run, **options)(*inputs)


def _shard_map(run: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    """Values found have a row for each device along the mesh axes of this map."""
    axes = mapped_axes(params)
    rows = PartitionSpec(tuple(x for x in params["mesh"].axis_names if x in axes))

    def shard(*inputs):
        out, arrays = run(*inputs)
        return out, jax.tree.map(lambda x: x[None], arrays)

    return shard_mapped(shard, params, ([*params["out_specs"]], rows))(*inputs)


def _scan(run: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    number, carried = scan_sizes(params)
    consts, rest = inputs[:number], inputs[number:]

    def step(carry, xs):
        out, arrays = run(*consts, *carry, *xs)
        return out[:carried], (out[carried:], arrays)

    carry, (ys, arrays) = jax.lax.scan(
        step, rest[:carried], rest[carried:], **_scan_options(params)
    )
    return [*carry, *ys], arrays


def _scan_without_carry(run: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    """What `jax.lax.scan` becomes under `JAX_SCAN3`: it writes to mutable arrays."""
    pairs = list(zip(inputs, params["extensives"], strict=True))

    def step(_, xs):
        slices = iter(xs)
        return (), run(*(next(slices) if sliced else x for x, sliced in pairs))

    xs = [x for x, sliced in pairs if sliced]
    return jax.lax.scan(step, (), xs, **_scan_options(params))[1]


def _scan_options(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in ("length", "reverse", "unroll")}


# With the name of the parameter that holds the program.
_RULES: Final[dict[str, tuple[Callable[..., Any], str]]] = {
    "shard_map": (_shard_map, "jaxpr"),
    "jit": (_jit, "jaxpr"),
    "closed_call": (lambda run, _, inputs: run(*inputs), "call_jaxpr"),
    "remat2": (_checkpoint, "jaxpr"),
    "scan": (_scan, "jaxpr"),
    "Scan3": (_scan_without_carry, "jaxpr"),
}
# For primitives with custom rules: the name of the parameter that holds their jaxpr.
_WITH_RULES: Final = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


def _marks(jaxpr: Any) -> Iterator[Mark]:
    for equation in jaxpr.eqns:
        if equation.primitive is mark_p:
            yield equation.params["mark"]
        yield from _marks_within(equation)


def _marks_within(equation: Any) -> Iterator[Mark]:
    _, params = name_and_params(equation)
    if params.get("differentiated"):
        return  # recomputed in a backward pass; the forward pass has these marks
    for program in programs_in(params):
        yield from _marks(opened(program)[0])


class Inputs(NamedTuple):
    """What a Module was called with, as [`equinox_like.capture`][] returns it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Around(Function):
    """A callable that wraps another one. Paths of Modules leave out the wrapper."""

    model: Any

    def __init__(self, model: Any, function: str):
        require_callable(model, function)
        check_not_class(model, "model")
        self.model = model

    @property
    def __wrapped__(self) -> Any:
        return self.model


class See(NamedTuple):
    mark: Mark
    of: Literal["outputs", "inputs"]
    scope: str = ""  # a `jax.named_scope` around the call


class Replace(NamedTuple):
    path: str
    function: Callable[[Any], Any]


def map_modules(
    node: Any, function: Callable[[str, Any], Any], path: tuple[Any, ...] = ()
) -> Any:
    """`node`, with each callable Module replaced by `function(path, module)`."""
    if node is None or jtu.all_leaves([node]):
        return node
    children, treedef = children_of(node)
    old = [child for _, child in children]
    new = [
        map_modules(
            child, function, path if isinstance(node, Around) else (*path, *step)
        )
        for step, child in children
    ]
    if any(a is not b for a, b in zip(old, new, strict=True)):
        node = treedef.unflatten(new)
    if not isinstance(node, Module) or not callable(node):
        return node
    # Calls of these wrappers call the Module that they hold, which is replaced itself.
    if isinstance(node, Around | BoundMethod | Frozen):
        return node
    return function(path_within(path), node)


def with_step(node: Any, step: See | Replace) -> Any:
    """A watched copy of `node`, whose call also runs `step`."""
    cls, state = type(node), node.__getstate__()
    steps = state.get("_steps_", ())  # `getattr` may find those of a wrapped layer
    state["_steps_"] = (*steps, step)
    return filled(cls if steps else _watched(cls), state)


def class_of(node: Any) -> Any:
    """The class of a node, or that of the Module of which it is a watched copy."""
    cls = type(node)
    return cls.__bases__[-1] if "_steps_" in vars(cls) else cls


class _Silent:
    """Keeps the `__init_subclass__` of a user from being called for a watched class."""

    def __init_subclass__(cls) -> None:
        pass


@functools.cache
def _watched(cls: type) -> type:
    """A subclass with a field for steps. Cached, as JAX never drops node classes."""

    @functools.wraps(cls.__call__)
    def call(self, /, *args, **kwargs):
        for step in self._steps_:
            if isinstance(step, See) and step.of == "inputs":
                args, kwargs = marked(Inputs(args, kwargs), step.mark)
        scopes = [x.scope for x in self._steps_ if isinstance(x, See) and x.scope]
        with jax.named_scope(scopes[0]) if scopes else contextlib.nullcontext():
            out = super(subclass, self).__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        # The innermost `intervene` adds its step last, and runs first.
        for step in reversed(self._steps_):
            if isinstance(step, Replace):
                out = replacement(step.function, out, step.path)
        for step in self._steps_:
            if isinstance(step, See) and step.of == "outputs":
                out = marked(out, step.mark)
        return out

    names = {
        "__call__": call,
        "__annotations__": {"_steps_": Any},
        "_steps_": field(static=True, default=()),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    subclass: Any = types.new_class(
        cls.__name__, (_Silent, cls), {}, lambda body: body.update(names)
    )
    return subclass


def replacement(function: Callable[[Any], Any], value: Any, path: str) -> Any:
    root = path or "<root>"
    message = f"The function of `intervene` for `{root}` must keep the structure."
    pairs = pair_leaves(value, function(value), message, root, error=ShapeError)
    new = [_same_type(x, y, path_str(step, root)) for step, x, y in pairs]
    return jtu.tree_structure(value).unflatten(new)


def _same_type(old: Any, new: Any, path: str) -> Any:
    if not is_array(old):
        return new
    if not isinstance(new, jax.Array):
        new = jnp.asarray(new)
    if (new.shape, new.dtype) != (old.shape, jax.typeof(old).dtype):
        raise ShapeError(
            f"The functions of `intervene` must keep the shape and dtype. `{path}` is "
            f"{describe_array(old)}, but its function returned {describe_array(new)}. "
            "Use `jax.numpy.full_like` or `astype`."
        )
    return new


# `capture` marks values with a depth of 1 or more.
_DEPTH: Final = 0
_SCOPE: Final = re.compile(r"eqx_layer_(\d+)_")


class LayerRow(NamedTuple):
    """One layer that was called, in [`equinox_like.nn.Summary`][]."""

    path: str
    layer: str
    output: Any
    operations: int
    share: float


def layer_rows(model: Any, args: Any, kwargs: Any) -> tuple[list[LayerRow], int]:
    """A row for each Module that `model(*args, **kwargs)` calls, in the order in which
    they return, and the number of all operations."""
    modules: list[tuple[str, str]] = []
    outputs: dict[str, list[Any]] = {}
    operations: collections.Counter[str] = collections.Counter()

    def watched(path, node):
        i = str(len(modules))
        modules.append((path, class_of(node).__name__))
        return with_step(node, See(Mark(i, _DEPTH), "outputs", f"eqx_layer_{i}_"))

    def call(model, args, kwargs):
        return model(*args, **kwargs)

    def read(program, times, axes, around):
        """Reads a program that runs `times`, within scans over `axes`."""
        for equation in opened(program)[0].eqns:
            name, params = name_and_params(equation)
            if equation.primitive is mark_p and params["mark"].depth == _DEPTH:
                avals = [x.aval for x in equation.outvars]
                arrays = [
                    jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype) for x in avals
                ]
                found = outputs.setdefault(params["mark"].path, [])
                found.append(params["rest"].fill(arrays))
            within = around.union(_SCOPE.findall(scopes_of(equation)))
            number = times * _operations(name, params, equation)
            operations.update(dict.fromkeys(within, number))
            steps = [params["length"]] if name in ("scan", "Scan3") else []
            for inner in programs_on_one_platform(params):
                read(inner, times * math.prod(steps), (*axes, *steps), within)

    inputs = map_modules(model, watched), args, kwargs
    read(trace(call, inputs, {})[0], 1, (), {"all"})
    total, rows = operations["all"], []
    for i, found in outputs.items():
        output, number = found[0] if len(found) == 1 else tuple(found), operations[i]
        rows.append(LayerRow(*modules[int(i)], output, number, number / (total or 1)))
    return rows, total


def _operations(name: str, params: dict[str, Any], equation: Any) -> int:
    if name not in ("dot_general", "conv_general_dilated"):
        return 0
    size = math.prod(equation.outvars[0].aval.shape)
    left, right = (x.aval.shape for x in equation.invars[:2])
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * size * math.prod(left[axis] for axis in contracted)
    channels = right[params["dimension_numbers"].rhs_spec[0]]
    return 2 * size * math.prod(right) // max(channels, 1)
