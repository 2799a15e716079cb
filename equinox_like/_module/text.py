"""`str2jax`: a text that transformations of JAX can return."""

import types
from typing import Any

from .module import Module


class Text(Module):
    """Base of what `str2jax` returns, whose class has the text as its name."""

    def __repr__(self) -> str:
        return type(self).__name__

    def __pdoc__(self, **_: Any) -> Any:
        import wadler_lindig as wl

        return wl.TextDoc(type(self).__name__)


def str2jax(msg: str) -> Text:
    """A pytree without leaves that is shown as a text.

    Useful as a mark that compiled functions can take and return. Each call makes a class:
    call it once, when a module is imported.

    **Arguments:**

    - `msg`: the text.

    **Returns:**

    An instance of a class of its own, whose name is `msg`. It is equal to itself alone.

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
