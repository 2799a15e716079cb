"""The path of the layer that an error is from, in the Module that was called first.

    At `decoder.layers[0]`: Linear takes ...    how the layers' own errors begin
    This is from `decoder.layers[0]`.           a note on any other error

It is found when an error is raised, from the frames of the calls; until then, nothing is
recorded. Each Module whose method runs is looked for in the ones further out, by identity.
A copy of a layer is known by the arrays that it shares, or by a frame of `call_part`. What
JAX built again is known by a frame of `call_rebuilt`, and the `outer_call` around it.
Where several places fit, none is chosen: a wrong name is worse than none.
"""

import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from traceback import walk_stack, walk_tb
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])
_Path = tuple[Any, ...]


def call_part(
    owner: Any, steps: Sequence[Any], part: Any, function: Any, /, *args, **kwargs
) -> Any:
    """`function(*args, **kwargs)`, which calls `part` or a method of it.

    `part` is what `owner` has at `steps`, names of fields and indices; without `steps`, it
    stands for `owner`, and has the same structure.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        add_note_on_path(error)
        leave_out_this_frame(error)
        raise


# `call_rebuilt(function, *args, **kwargs)`, of which JAX has built all that holds arrays.
call_rebuilt = functools.partial(call_part, None, (), None)


def outer_call(function: _F) -> _F:
    """Marks a function `(*args, **kwargs)` that leads to a `call_rebuilt` with the same
    arguments. The first one is the function, or a `Transformed` that holds it."""
    _outer_calls.add((function.__module__, function.__qualname__))
    return function


def path_here() -> str:
    """The path for an error that is made now; empty if it is not known."""
    return _path(sys._getframe(1))


def add_note_on_path(error: BaseException) -> None:
    """Adds the path as a note, once. Call it in an `except` clause."""
    entry: Any = error.__traceback__
    depth, note = getattr(error, "_noted_", (0, None))
    here = sum(1 for _ in walk_stack(entry.tb_frame)) if entry else -1
    if here < depth:  # further out, where an error arrives that has its note
        return
    with contextlib.suppress(Exception):  # of an exception that is a frozen dataclass
        if depth:  # the same error is raised again, from another place
            error._noted_ = sys.maxsize, None  # pyright: ignore[reportAttributeAccessIssue]
            error.__notes__ = [text for text in error.__notes__ if text != note]
            return
        path = _path(entry.tb_frame, entry.tb_next)
        note = f"This is from {path}." if path else None
        error._noted_ = here, note  # pyright: ignore[reportAttributeAccessIssue]
        if note is not None:
            error.add_note(note)


def outermost(error: BaseException) -> Any:
    """The outermost Module whose method runs. Call it in an `except` clause."""
    entry: Any = error.__traceback__
    return next(filter(_is_module, reversed(_calls(entry.tb_frame))), None)


def leave_out_this_frame(error: Exception) -> None:
    """Call it in an `except` clause, before a bare `raise`."""
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
        return
    entry = error.__traceback__
    if entry is not None and entry.tb_next is not None:
        BaseException.with_traceback(error, entry.tb_next)


def with_article(name: str) -> str:
    """`a Linear`, `an Embedding`, `an MLP`, for the name of a class."""
    # Acronyms are spelled out when read: "an em-el-pee".
    read = name.lstrip("_")
    vowels = "AEFHILMNORSX" if read[:2].isupper() else "AEIOaeio"
    return f"{'an' if read.startswith(tuple(vowels)) else 'a'} {name}"


class _Part(NamedTuple):
    """A call of `call_part`."""

    owner: Any
    steps: Sequence[Any]
    part: Any


class _Boundary(NamedTuple):
    """A call at one side of JAX: of `call_rebuilt` within, or an outer call."""

    is_rebuilt: bool
    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]


# By module and name: a runtime type checker puts functions of its own around these.
_outer_calls: Final[set[tuple[str, str]]] = set()
_CONSTRUCTORS: Final = "__init__", "__post_init__", "__check_init__", "__setattr__"


def _calls(frame: Any, tb: Any = None) -> list[Any]:
    """What is called in a traceback, in a frame and around it; the innermost is first."""
    frames = *reversed(list(walk_tb(tb))), *walk_stack(frame)
    return [call for frame, _ in frames if (call := _call_in(frame)) is not None]


def _call_in(frame: types.FrameType) -> Any:
    """The Module whose method a frame runs, the `_Part` or the `_Boundary`; else `None`."""
    code = frame.f_code
    function_name = frame.f_globals.get("__name__", ""), code.co_qualname
    if function_name == (__name__, "call_part"):
        owner, steps, part, *call = _read(frame, *code.co_varnames[:6])
        return _Boundary(True, *call) if part is None else _Part(owner, steps, part)
    if function_name in _outer_calls:
        *first, args, kwargs = _read(frame, *code.co_varnames[: code.co_argcount + 2])
        if first and hasattr(first[0], "keywords"):  # a method that is a `Partial`
            first = [first[0].func, *first[0].args]
        function, *args = *first, *args
        return _Boundary(False, getattr(function, "_held_", function), args, kwargs)
    if code.co_argcount == 0 or code.co_name in _CONSTRUCTORS:
        return None
    name, owner = code.co_varnames[0], code.co_qualname.rpartition(".")[0]
    if name != "self" and (not owner or owner.endswith("<locals>")):
        return None
    (first,) = _read(frame, name)
    if not _is_module(first) or type(first)._passes_calls_on_:
        return None
    is_method = any(cls.__qualname__ == owner for cls in type(first).__mro__)
    return first if is_method or name == "self" else None


def _is_module(node: Any) -> bool:
    return "_module_spec_" in vars(type(node))


def _read(frame: types.FrameType, *names: str) -> tuple[Any, ...]:
    """Local variables of a frame."""
    variables = frame.f_locals
    values = tuple(map(variables.get, names))
    # Until Python 3.12 the frame keeps this copy, and so all that it refers to. With
    # another reference, it is what `locals()` has returned.
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        if sys.getrefcount(variables) <= 3:
            variables.clear()
    return values


def _path(frame: Any, tb: Any = None) -> str:
    """The text of the path; empty if it is not known."""
    try:
        sections = list(_sections(_calls(frame, tb)))
    except Exception:  # e.g. of a tree that cannot be flattened; the error matters more
        return ""
    shown = []
    for number, (node, path) in enumerate(sections, 1):
        steps = (s for s in path if str(s) not in (".__wrapped__", ".__self__"))
        if text := jtu.keystr(tuple(steps)).removeprefix("."):
            kind = with_article(type(node).__name__)
            shown.append(f"`{text}`" + (number < len(sections)) * f" of {kind}")
    return ", in ".join(shown)


def _sections(calls: Sequence[Any]) -> Iterator[tuple[Any, _Path]]:
    """Modules, each with the path in it to the one before; the last is the outermost."""
    while calls:
        node, *calls = calls
        if not _is_module(node):
            continue
        path, rebuilt, reached = (), [], 0
        for i, call in enumerate(calls, 1):
            if call is node:
                reached = i
            elif isinstance(call, _Boundary):
                if call.is_rebuilt:
                    rebuilt.append(call)
                    continue
                originals = (_original(node, inner, call) for inner in rebuilt)
                node = next((x for x in originals if x is not None), node)
            else:
                rebuilt = []
                is_part = isinstance(call, _Part)
                owner, steps, tree = call if is_part else (call, (), call)
                found = _find(node, tree)
                if not found and (not steps or _is_module(tree)):
                    continue
                # It may be any of these, or was called by a function in a container.
                if len(found) != 1:
                    yield node, path
                    path = ()
                reached, common = i, _common(found)
                if is_part and not steps:
                    node = dict(nodes_with_paths(owner)).get(common, node)
                else:
                    node, path = owner, (*map(_key, steps), *common, *path)
        yield node, path
        calls = calls[reached:]


def _original(node: Any, rebuilt: _Boundary, outer: _Boundary) -> Any:
    """What `node`, of a rebuilt argument, was in the outer call; `None` if not known.

    The arguments of one structure are in the same order in both.
    """
    found = _find(node, _arguments(rebuilt))
    if len(found) != 1:
        return None
    place, *path = found[0]
    before, after = map(_arguments, (rebuilt, outer))
    structure = jtu.tree_structure(before[place.idx])
    alike = [i for i, x in enumerate(before) if jtu.tree_structure(x) == structure]
    places = [i for i, x in enumerate(after) if jtu.tree_structure(x) == structure]
    is_sure = len(places) == 1 or rebuilt.kwargs.keys() == outer.kwargs.keys()
    if len(alike) != len(places) or not is_sure:
        return None
    original = after[places[alike.index(place.idx)]]
    original = dict(nodes_with_paths(original)).get(tuple(path))
    return original if type(original) is type(node) else None


def _arguments(call: _Boundary) -> list[Any]:
    named = (call.kwargs[name] for name in sorted(call.kwargs))
    return [call.function, *call.args, *named]


def nodes_with_paths(tree: Any) -> list[tuple[_Path, Any]]:
    """All nodes and leaves of a tree, in the order in which JAX visits them."""
    found = []

    def visit(path, node):
        found.append((path, node))
        return False

    jtu.tree_flatten_with_path(tree, visit, is_leaf_takes_path=True)
    return found


def _find(inner: Any, outer: Any) -> list[_Path]:
    """Where `outer` has `inner`, or else nodes of its type with the most of its arrays."""
    nodes = nodes_with_paths(outer)
    if same := [path for path, node in nodes if node is inner]:
        return same
    arrays = [(p, x) for p, x in jtu.tree_leaves_with_path(inner) if _is_array(x)]
    known = {id(node) for _, node in nodes}
    scores = {}
    for path, node in nodes:
        if type(node) is type(inner):
            own = dict(jtu.tree_leaves_with_path(node))
            # In a `Shared`, another node has an array, and here is a `SharedNode`.
            scores[path] = sum(
                own[p] is x or (not _is_array(own[p]) and id(x) in known)
                for p, x in arrays
                if p in own
            )
    most = max(scores.values(), default=0)
    return [path for path, score in scores.items() if score == most > 0]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _key(step: Any) -> Any:
    return jtu.GetAttrKey(step) if isinstance(step, str) else jtu.SequenceKey(step)


def _common(paths: Sequence[_Path]) -> _Path:
    """What the paths begin with."""
    same = itertools.takewhile(lambda s: len(set(s)) < 2, zip(*paths, strict=False))
    return tuple(steps[0] for steps in same)
