"""Names the argument that JAX could not convert to an array.

An object with a method `__jax_array__` is static, and JAX refuses to convert it while it
traces. Its messages name no argument.
"""

from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._compat.messages import tells_of_unconverted
from .._tree.deleted import named_arguments
from .._tree.filters import has_conversion, is_array
from .._tree.nodes import MAKE_A_PYTREE, with_article
from .._tree.paths import path_str


def name_unconverted(
    error: Exception, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Replaces the message of such an error, raised by a call of `fun` with these
    arguments, by one with the path."""
    if not tells_of_unconverted(error):
        return
    for name, tree in named_arguments(fun, args, kwargs):
        for path, leaf in jtu.tree_leaves_with_path(tree):
            if isinstance(leaf, np.ndarray) and leaf.dtype == object and leaf.size:
                path, leaf = (*path, jtu.SequenceKey(0)), leaf.flat[0]
            if has_conversion(leaf) and not is_array(leaf):
                shown = path_str(path, name)
                error.args = (
                    f"`{shown}` is {with_article(type(leaf).__name__)}, which has a method "
                    "`__jax_array__`. JAX does not call it while it traces a function: "
                    f"pass `jnp.asarray({shown})`. Or, so that JAX sees the arrays in the "
                    f"object: {MAKE_A_PYTREE}",
                )
                return
