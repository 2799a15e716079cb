"""The Module class."""

from .fields import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    field as field,
)
from .freezing import (
    Frozen as Frozen,
    frozen as frozen,
    trainable as trainable,
    unfrozen as unfrozen,
)
from .module import Module as Module
from .wrappers import (
    Partial as Partial,
    Static as Static,
    module_update_wrapper as module_update_wrapper,
)
