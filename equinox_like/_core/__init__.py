"""What all transformations share."""

from .at_inference import (
    inference as inference,
    is_inference as is_inference,
    training as training,
)
from .caches import clear_caches as clear_caches
from .context import Context as Context
