"""`str2jax`: a text that JAX's transformations can return."""

import types
from typing import Any

from .module import Module


class Text(Module):
    """Base class for `str2jax`, whose result is of a subclass named like the text."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __pdoc__(self, **_: Any) -> Any:
        import wadler_lindig as wl

        return wl.TextDoc(type(self).__name__)


def str2jax(msg: str) -> Text:
    """A pytree without leaves that is shown as a text.

    Compiled functions can take and return it, for example as a marker. Each call
    creates a class, so call it once, at the top level of a module.

    **Arguments:**

    - `msg`: the text.

    **Returns:**

    An instance of a new class whose name is `msg`. It equals only itself.

    !!! example

        ```python
        import equinox_like as eqx
        import jax

        unchanged = eqx.internal.str2jax("unchanged")
        assert str(jax.jit(lambda: unchanged)()) == "unchanged"
        ```
    """
    made = types.new_class(msg, (Text,), exec_body=lambda body: body.update(_BODY))
    return made()


_BODY = {"__doc__": None, "__module__": __name__}
