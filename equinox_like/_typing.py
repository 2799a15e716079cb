"""Types of arguments, which signatures show by their names.

`jax.typing` and jaxtyping define them as plain unions, of which `help` and
`inspect.signature` print every member, with private paths of JAX. Runtime type checkers
read these aliases as they read the unions.
"""

import jax.typing
import jaxtyping
from typing_extensions import TypeAliasType

ArrayLike = TypeAliasType("ArrayLike", jax.typing.ArrayLike)
DTypeLike = TypeAliasType("DTypeLike", jax.typing.DTypeLike)
PRNGKeyArray = TypeAliasType("PRNGKeyArray", jaxtyping.PRNGKeyArray)
