"""The name in Equinox's file of this name that astronomix uses."""

import functools

from equinox_like.internal import while_loop

checkpointed_while_loop = functools.partial(while_loop, kind="checkpointed")
