"""Whether a layer is at inference: by the call, by its own flag, or by the context."""

from typing import Any

from .._core.at_inference import is_inference
from .._warn import warn


def at_inference(layer: Any, inference: Any) -> Any:
    """What decides of a layer with a field `inference` that was called with `inference`."""
    flag = layer.inference
    # Identity: of an array the value is not asked.
    if inference is None and flag is False and is_inference():
        name = type(layer).__name__
        warn(
            f"{name} was called within `equinox_like.inference()`, but it has "
            "`inference=False`, which takes precedence. To make the model follow the "
            "context, use `model = nn.inference_mode(model, None)`; if this is "
            f"intended, pass `inference=False` to the call of {name}."
        )
    return is_inference(inference, flag)
