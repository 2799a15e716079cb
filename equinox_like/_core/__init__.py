"""What all transformations share."""

from .base import clear_caches as clear_caches
from .context import (
    Context as Context,
    inference as inference,
    is_inference as is_inference,
    training as training,
)
