"""Models as pytrees in JAX: modules, filtered transformations, visible donation."""

import importlib as _importlib
import typing as _t

from . import _environment as _environment
from ._core import (
    Context as Context,
    clear_caches as clear_caches,
    inference as inference,
    is_inference as is_inference,
    training as training,
)
from ._errors import (
    DonationError as DonationError,
    DonationWarning as DonationWarning,
    EquinoxRuntimeError as EquinoxRuntimeError,
    EquinoxTracetimeError as EquinoxTracetimeError,
    LeafError as LeafError,
    MissingKeyError as MissingKeyError,
    NotAnArrayError as NotAnArrayError,
    NotInvertibleError as NotInvertibleError,
    RetraceWarning as RetraceWarning,
    ShapeError as ShapeError,
)
from ._jit import (
    DonationReport as DonationReport,
    Retrace as Retrace,
    filter_jit as filter_jit,
)
from ._module import (
    AbstractClassVar as AbstractClassVar,
    AbstractVar as AbstractVar,
    Module as Module,
    Partial as Partial,
    field as field,
    frozen as frozen,
    module_update_wrapper as module_update_wrapper,
    trainable as trainable,
    unfrozen as unfrozen,
)
from ._public import missing as _missing, publish as _publish
from ._transforms import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    filter_vmap as filter_vmap,
    if_array as if_array,
)
from ._tree import (
    apply_updates as apply_updates,
    combine as combine,
    filter as filter,
    is_array as is_array,
    is_array_like as is_array_like,
    is_inexact_array as is_inexact_array,
    is_inexact_array_like as is_inexact_array_like,
    partition as partition,
    tree_at as tree_at,
    tree_equal as tree_equal,
    tree_inference as tree_inference,
    tree_pformat as tree_pformat,
    tree_pprint as tree_pprint,
)

if _t.TYPE_CHECKING:
    from . import debug as debug, internal as internal, nn as nn, orbax as orbax
    from ._late import *  # noqa: F403


__version__ = "0.1.0"
_LATE_MODULES = "debug", "internal", "nn", "orbax"
_publish(globals(), __name__)


# Type checkers that see this take every name for one of the module.
if not _t.TYPE_CHECKING:

    def __getattr__(name: str) -> _t.Any:
        if name in _LATE_MODULES:
            return _importlib.import_module(f".{name}", __name__)
        found = _load_late().get(name)
        if found is None:
            raise _missing(__name__, name)
        return found


def __dir__() -> list[str]:
    # Without `orbax`: tools load all listed names, and it needs another package.
    return sorted({*globals(), *_load_late(), *_LATE_MODULES} - {"orbax"})


def _load_late() -> dict[str, _t.Any]:
    late = _importlib.import_module("._late", __name__)
    public = {k: v for k, v in vars(late).items() if not k.startswith("_")}
    _publish(public, __name__)
    globals().update(public)
    return public
