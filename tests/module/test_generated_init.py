"""The generated `__init__` of a Module is that of a dataclass with the same fields."""

import dataclasses
import inspect
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

import equinox_like as eqx

KINDS = ["plain", "default", "factory", "not in init", "made", "init only"]


def namespace_of(kinds: list[tuple[str, bool]], names: list[str]) -> dict[str, Any]:
    """The body of a class with these fields, which records the call of `__post_init__`."""
    body: dict[str, Any] = {"__annotations__": {}, "__module__": __name__}
    passed_on = []
    for name, (kind, kw_only) in zip(names, kinds, strict=True):
        body["__annotations__"][name] = object
        options: dict[str, Any] = {"kw_only": kw_only}
        if kind == "default":
            options["default"] = name
        elif kind in ("factory", "made"):
            options["default_factory"] = lambda name=name: [name]
            options["init"] = kind == "factory"
        elif kind == "not in init":
            options |= {"default": name, "init": False}
        elif kind == "init only":
            passed_on.append(name)
            body["__annotations__"][name] = dataclasses.InitVar[object]
            options["default"] = name
        body[name] = dataclasses.field(**options)

    def __post_init__(self, *args):
        CALLS.append((type(self).__name__, args))

    if passed_on:
        body["__post_init__"] = __post_init__
    return body


CALLS: list[tuple[str, tuple[Any, ...]]] = []
fields = st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=6)


@given(fields, st.booleans(), st.data())
def test_generated_init_is_that_of_a_dataclass(kinds, has_self, data):
    names = ["self" if i == 0 and has_self else f"f{i}" for i in range(len(kinds))]
    plain = type("Case", (), namespace_of(kinds, names))
    try:
        plain = dataclasses.dataclass(plain)
    except TypeError as error:
        with pytest.raises(TypeError, match="follows default argument") as caught:
            type(eqx.Module)("Case", (eqx.Module,), namespace_of(kinds, names))
        assert str(caught.value).startswith(str(error))
        return
    module = type(eqx.Module)("Case", (eqx.Module,), namespace_of(kinds, names))
    signature = inspect.signature(plain)
    assert str(inspect.signature(module)) == str(signature)
    args = data.draw(st.lists(st.integers(), max_size=len(names)))
    kwargs = data.draw(
        st.dictionaries(st.sampled_from([*names, "other"]), st.integers())
    )
    outcomes = []
    for cls in (plain, module):
        CALLS.clear()
        try:
            made = cls(*args, **kwargs)
            shown = {n: getattr(made, n) for n in names if n in vars(made)}
            outcomes.append((shown, list(CALLS)))
        except TypeError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


def test_first_instance_takes_time_by_the_number_of_fields():
    def seconds(count: int) -> float:
        annotations = {f"f{i}": object for i in range(count)}
        body = {"__annotations__": annotations, "__module__": __name__}
        cls: Any = type(eqx.Module)("Wide", (eqx.Module,), body)
        start = time.process_time()
        assert cls(*range(count)).f7 == 7
        return time.process_time() - start

    few, many = (min(seconds(n) for _ in range(2)) for n in (1000, 12_000))
    assert many < 30 * few  # it was 100 times as long
