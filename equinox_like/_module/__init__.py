"""Layer 2: the Module class."""

from .field import field as field
from .module import Module as Module
from .partial import Partial as Partial
