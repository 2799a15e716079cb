"""Layer 7: names for authors of other libraries. They may change in any version.

Nothing is defined here.
"""

from .._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Static as Static,
)
from .._tree.format import TreeWLCustom as TreeWLCustom
