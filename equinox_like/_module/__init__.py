"""The Module class."""

from .abstract import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
)
from .fields import field as field
from .freezing import (
    Frozen as Frozen,
    frozen as frozen,
    trainable as trainable,
    unfrozen as unfrozen,
)
from .module import Module as Module
from .partial import Partial as Partial
from .static import Static as Static
from .wrapper import module_update_wrapper as module_update_wrapper
