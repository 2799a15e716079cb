"""Whether a layer is at inference: set by the call, its own flag, or the context."""

from typing import Any

from ..._core.context import is_inference
from ..._warn import warn


def at_inference(layer: Any, inference: Any) -> Any:
    """Whether a layer called with `inference` is at inference.

    The result may be an array, if the layer's own field `inference` is one.
    """
    flag = layer.inference
    # `is False`, because the flag may be an array, whose value may be traced.
    if inference is None and flag is False and is_inference():
        name = type(layer).__name__
        warn(
            f"{name} was called within `equinox_like.inference()`, but it has "
            "`inference=False`, which takes precedence. To make the model follow the "
            "context, use `model = nn.inference_mode(model, None)`; if this is "
            f"intended, pass `inference=False` to the call of {name}."
        )
    return is_inference(inference, flag)
