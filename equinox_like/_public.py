"""What users are shown of public names, and what to write for names of other libraries.

`publish` sets the `__module__` of functions and exceptions to their public module. So
tracebacks and `help` show `equinox_like.LeafError`, and not the private file. Other
classes keep the name of their file, which `inspect.getsource` needs to find their
source.

`describe_arguments` moves what the constructor of a layer says of its arguments to the
docstring of the class. `help` begins with that, and shows `__init__` two screens later.
The pages are made from the source, where both have their own docstring.

`missing` is the error for a name that is not found in `equinox_like` or `nn`. If it is one
of PyTorch, Flax, Haiku, Keras or JAX, the error says what to write in place of it. The page
"Coming from PyTorch" shows the same table.
"""

import importlib
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from opcode import opmap
from types import FunctionType
from typing import Any, Final

import jax

from ._errors import is_internal


def publish(names: Mapping[str, Any], module: str) -> None:
    """Sets the `__module__` of the public functions and exceptions in `names`."""
    for name, value in names.items():
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        if (
            not name.startswith("_")
            and (is_error or isinstance(value, FunctionType))
            and value.__name__ == name
            and value.__module__.startswith(f"{__package__}.")
        ):
            value.__module__ = module


def describe_arguments(names: Mapping[str, Any]) -> None:
    """Describes the arguments of public classes after the first paragraph of each."""
    described = set()
    # Before Python 3.13, a docstring is indented as it is in the source.
    indent = "" if sys.version_info >= (3, 13) else "    "
    for name, value in names.items():
        if name.startswith("_") or not isinstance(value, type):
            continue
        arguments = (value.__init__.__doc__ or "").rstrip()
        if arguments.startswith("**Arguments:**") and value.__doc__:
            purpose, _, rest = value.__doc__.partition("\n\n")
            arguments = indent + arguments.replace(f"\n{indent}", "\n")
            if not rest.lstrip().startswith("!!!"):
                rest = f"{indent}**Details:**\n\n{rest}"
            value.__doc__ = f"{purpose}\n\n{arguments}\n\n{rest}"
            described.add(value.__init__)
    for init in described:  # now, because several classes may share one
        init.__doc__ = None


# Names, with `*` and `?` as in a shell, and what to use in place of them.
TABLE: Final = {
    "ModuleList ParameterList": "a list or a tuple as a field",
    "ModuleDict ParameterDict": "a dictionary as a field; JAX sorts its keys",
    "Parameter Param Variable": "a field with a floating-point array; not a number",
    "Buffer BatchStat": "`eqx.field(trainable=False)`, or `nn.State` if a call changes it",
    "compact setup": "an `__init__` that makes the layers",
    "Dense LazyLinear": "`nn.Linear(2, 3, key=key)`",
    "Bilinear DenseGeneral": "`jnp.einsum`, or `nn.Einsum` for one input",
    "Embed EmbeddingBag": "`nn.Embedding(10, 3, key=key)`",
    "GRU": "`nn.RNN.build(nn.GRUCell, 2, 3, key=key)`",
    "LSTM OptimizedLSTMCell": "`nn.RNN.build(nn.LSTMCell, 2, 3, key=key)`",
    "RNNBase RNNCell SimpleCell SimpleRNN": "`nn.RNN` with a cell of your own",
    "BatchNorm?d SyncBatchNorm BatchNormalization": "`nn.BatchNorm(3)`, with a state",
    "InstanceNorm?d": "`nn.InstanceNorm(3)`",
    "Dropout?d SpatialDropout?D": "`nn.Dropout` with `broadcast_axes=`",
    "MultiHead* SelfAttention": "`nn.MultiheadAttention(2, 8, key=key)`",
    "Transformer*": "`nn.MultiheadAttention` and `nn.MLP` in a Module, and `nn.Stacked`",
    "Flatten": "`jnp.ravel`",
    "Reshape Unflatten Pixel*": "`jnp.reshape`",
    "*Pad?d ZeroPadding?D": "`jnp.pad`",
    "Upsampling* UpSampling*": "`nn.Upsample(2)`",
    "GELU": "`functools.partial(jax.nn.gelu, approximate=False)`",
    "*shrink Softmin Threshold": "a function of your own, with `jnp.where`",
    "CrossEntropyLoss": "`optax.softmax_cross_entropy_with_integer_labels`",
    "BCE*Loss": "`optax.sigmoid_binary_cross_entropy`, of logits",
    "*Loss": "a function of Optax, such as `optax.squared_error`, or your own",
    "functional": "`jax.nn` and `jnp`, and `optax` for losses",
    "init": "`weight_init=` of a layer, or `nn.reinit`",
    "utils": "`nn.WeightNorm`, `nn.SpectralNorm`, or `optax.clip_by_global_norm`",
    "*DataParallel": "`eqx.filter_shard`",
    "optim Optimizer": "`optax`",
    "remat": "`eqx.filter_checkpoint`",
    "make_sharded": "`eqx.Layout.init`",
    "shardings": "`eqx.Layout.shardings`",
    "tree_map": "`jax.tree.map`",
}


def find(name: str) -> str | None:
    """What to use in place of `name`, or `None` if that is not known.

    Names that are in no row may be one of ours or of JAX, elsewhere, or in another case.
    """
    for names, answer in TABLE.items():
        if any(fnmatchcase(name, each) for each in names.split()):
            return answer
    library: Any = importlib.import_module(__name__.partition(".")[0])
    modules = library, library.nn, jax.nn, jax, jax.lax
    plain = name.replace("_", "").lower()
    for place, module in zip(_PLACES, modules, strict=True):
        known = {x.replace("_", "").lower(): x for x in dir(module) if x[0] != "_"}
        for there in (f"filter{plain}", plain):
            if there in known:
                return f"`{place}.{known[there]}`"
    return None


_PLACES: Final = "eqx", "nn", "jax.nn", "jax", "jax.lax"


def missing(module: str, name: str) -> Exception:
    """The error for a name that is not in a module of ours."""
    text = f"module {module!r} has no attribute {name!r}"
    answer = None if name.startswith("_") else find(name)
    if answer is None:
        return AttributeError(text)
    # In `from module import name`, Python would drop the text of an `AttributeError`.
    caller: Any = sys._getframe(1)
    while is_internal(caller.f_code.co_filename):
        caller = caller.f_back
    if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        text = f"cannot import name {name!r} from {module!r}"
        return ImportError(f"{text}. Use {answer}.", name=module)
    # With `name` alone, Python suggests no other name.
    return AttributeError(f"{text}. Use {answer}.", name=name, obj=None)
