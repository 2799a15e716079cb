"""Validation of the layers and functions that another layer is built with."""

from collections.abc import Iterable
from typing import Any

from ..._annotations import signature_of
from ..._module import Module
from ..._tree.nodes import describe_node


def refuse_layer_class(taker: str, name: str, layer: Any) -> None:
    """Raises `TypeError` for a class of layers in place of a layer.

    A class is callable, so a call of it would return a new layer instead of an array.
    """
    if isinstance(layer, type) and issubclass(layer, Module):
        raise TypeError(
            f"{taker} takes a layer as `{name}`; got the class {layer.__name__}. Write "
            f"`{layer.__name__}(...)`."
        )


def refuse_model(make_model: Any) -> None:
    """Raises `TypeError` for a model in place of its class: its call takes a state."""
    if not isinstance(make_model, Module):
        return
    # The call of the class: a wrapper of a factory has the signature of the factory.
    if "state" in signature_of(type(make_model).__call__).parameters:
        name = type(make_model).__name__
        raise TypeError(
            "`make_with_state` takes a class, or a function that returns a model, as "
            f"`make_model`; got {describe_node(make_model)}. Write "
            f"`make_with_state({name})(...)`, with the arguments of `{name}` in the second "
            "call."
        )


def check_layer(
    taker: str, name: str, layer: Any, wanted: str = "a layer or a function"
) -> None:
    """Raises `TypeError` unless `layer` can be called, and for a class of layers."""
    refuse_layer_class(taker, name, layer)
    check_function(taker, name, layer, wanted)


def check_function(
    taker: str, name: str, function: Any, wanted: str = "a function"
) -> None:
    """Raises `TypeError` unless `function` can be called."""
    if not callable(function):
        raise TypeError(
            f"{taker} takes {wanted} as `{name}`; got {describe_node(function)}."
        )


def as_layers(taker: str, name: str, layers: Iterable[Any]) -> tuple[Any, ...]:
    """`layers` as a tuple, after validating that it is a sequence without classes."""
    try:
        iterator = iter(layers)
    except TypeError:
        raise TypeError(
            f"{taker} takes a list of layers as `{name}`; got {describe_node(layers)}. "
            f"Write `{taker}([...])`."
        ) from None
    found = tuple(iterator)
    for i, layer in enumerate(found):
        refuse_layer_class(taker, f"{name}[{i}]", layer)
    return found
