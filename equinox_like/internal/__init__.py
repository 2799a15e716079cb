"""Layer 7: names for authors of other libraries. They may change in any version.

Nothing is defined here.
"""

from .._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Static as Static,
)
from .._runtime.enumeration import Enumeration as Enumeration
from .._runtime.error_if import (
    branched_error_if as branched_error_if,
    error_if as error_if,
)
from .._tree.format import TreeWLCustom as TreeWLCustom
