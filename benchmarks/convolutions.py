"""Convolutions on a CPU: forward, and the gradients of the input and of the weight.

Beside the convolution of JAX, and layers of Equinox, Flax NNX and PyTorch, if those are
installed. Then a step of a U-Net and of a ConvNeXt block. To measure one thread, start
Python on one core, with `taskset --cpu-list 0`.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import equinox_like as eqx

from ._measure import compare, show
from ._models import LIBRARIES

KEY = jax.random.key(0)
Programs = dict[str, Callable[[], Any]]


class Case(NamedTuple):
    name: str
    shape: tuple[int, ...]  # of a batch (examples, channels, *space)
    kernel: int
    stride: int = 1
    groups: int = 1
    is_transposed: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape) - 2

    @property
    def arguments(self) -> tuple[int, ...]:
        """Of a layer, from the number of input channels to the padding."""
        channels = self.shape[1]
        return channels, channels, self.kernel, self.stride, (self.kernel - 1) // 2


CASES = [
    Case("1d", (8, 64, 512), 3),
    Case("1d, depthwise", (8, 64, 1024), 4, 1, 64),
    Case("1d, depthwise, kernel 31", (8, 64, 256), 31, 1, 64),
    Case("2d", (8, 64, 16, 16), 3),
    Case("2d, 4 groups", (8, 64, 16, 16), 3, 1, 4),
    Case("2d, 32 groups", (2, 128, 14, 14), 3, 1, 32),
    Case("2d, depthwise", (8, 64, 32, 32), 3, 1, 64),
    Case("2d, depthwise, stride 2", (8, 64, 32, 32), 3, 2, 64),
    Case("2d, depthwise, kernel 7", (8, 64, 16, 16), 7, 1, 64),
    Case("3d", (4, 16, 12, 12, 12), 3),
    Case("3d, stride 2", (4, 16, 16, 16, 16), 3, 2),
    Case("3d, depthwise", (4, 16, 12, 12, 12), 3, 1, 16),
    Case("1d, transposed", (8, 64, 256), 4, 2, 1, True),
    Case("2d, transposed", (4, 64, 16, 16), 2, 2, 1, True),
    Case("2d, transposed, kernel 4", (4, 64, 16, 16), 4, 2, 1, True),
    Case("3d, transposed", (4, 16, 6, 6, 6), 2, 2, 1, True),
]


def run(rounds: int) -> None:
    print(f"{len(os.sched_getaffinity(0))} cores")
    few = max(3, rounds // 5)
    for case in CASES:
        rows = []
        found = {"jax.lax": of_jax(case), "ours": of_library(eqx, case)}
        for name, make in OTHERS.items():
            found[name] = make(case)
        for i, part in enumerate(
            ("forward", "gradient of the input", "gradient of the weight")
        ):
            calls = {name: programs[i] for name, programs in found.items()}
            rows.append(compare(part, calls, rounds=few))
        show(case.name, rows)
    rows = []
    for name, (make, x) in {"U-Net": UNET, "ConvNeXt block": CONVNEXT}.items():
        calls = {key: step(library, make(library), x) for key, library in ORDERED}
        rows.append(compare(f"{name}: a step", calls, rounds=few))
    show("Networks of convolutions", rows)


def of_function(f: Callable[..., jax.Array], weight: Any, x: jax.Array) -> list[Any]:
    """The programs of a function, each without arguments."""
    y = f(weight, x)
    forward = jax.jit(f)
    of_input = jax.jit(lambda weight, y: jax.vjp(lambda x: f(weight, x), x)[1](y))
    of_weight = jax.jit(lambda x, y: jax.vjp(lambda w: f(w, x), weight)[1](y))
    return [
        lambda: jax.block_until_ready(forward(weight, x)),
        lambda: jax.block_until_ready(of_input(weight, y)),
        lambda: jax.block_until_ready(of_weight(x, y)),
    ]


def of_jax(case: Case) -> list[Any]:
    channels, _, kernel, stride, padding = case.arguments
    weight = jax.random.normal(
        KEY, (channels, channels // case.groups) + (kernel,) * case.ndim
    )
    steps, ones = (stride,) * case.ndim, (1,) * case.ndim
    window, dilation = (ones, steps) if case.is_transposed else (steps, ones)
    added = kernel - 1 - padding if case.is_transposed else padding

    def convolve(weight: jax.Array, x: jax.Array) -> jax.Array:
        pads = [(added, added)] * case.ndim
        return jax.lax.conv_general_dilated(
            x, weight, window, pads, dilation, feature_group_count=case.groups
        )

    return of_function(convolve, weight, jax.random.normal(KEY, case.shape))


def of_library(library: Any, case: Case) -> list[Any]:
    kind = library.nn.ConvTranspose if case.is_transposed else library.nn.Conv
    *sizes, padding = case.arguments
    options = {"padding": padding, "groups": case.groups, "use_bias": False}
    layer = kind(case.ndim, *sizes, key=KEY, **options)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def call(arrays: Any, x: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(x)

    return of_function(call, arrays, jax.random.normal(KEY, case.shape))


def of_nnx(nnx: Any, case: Case) -> list[Any]:
    channels, _, kernel, stride, padding = case.arguments
    kernel, stride = (kernel,) * case.ndim, (stride,) * case.ndim
    options: dict[str, Any] = {"use_bias": False, "rngs": nnx.Rngs(0)}
    if case.is_transposed:
        added = (kernel[0] - 1 - padding,) * 2
        kind, options["padding"] = nnx.ConvTranspose, [added] * case.ndim
    else:
        kind, options["feature_group_count"] = nnx.Conv, case.groups
        options["padding"] = [(padding, padding)] * case.ndim
    layer = kind(channels, channels, kernel, stride, **options)
    graph, weight = nnx.split(layer)
    x = jax.random.normal(KEY, (case.shape[0], *case.shape[2:], channels))
    return of_function(lambda weight, x: nnx.merge(graph, weight)(x), weight, x)


def of_torch(torch: Any, case: Case) -> list[Any]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    name = f"Conv{'Transpose' if case.is_transposed else ''}{case.ndim}d"
    options = {"groups": case.groups, "bias": False}
    layer = getattr(torch.nn, name)(*case.arguments, **options)
    x = torch.from_numpy(np.array(jax.random.normal(KEY, case.shape)))
    zeros, ones = [0] * case.ndim, [1] * case.ndim
    with torch.no_grad():
        y = layer(x)

    def forward() -> Any:
        with torch.no_grad():
            return layer(x).shape

    def backward(*which: bool) -> Any:
        arrays, moves = (y, x, layer.weight.detach()), (layer.stride, layer.padding)
        rest = ones, case.is_transposed, zeros, case.groups, which
        return torch.ops.aten.convolution_backward(*arrays, None, *moves, *rest) and 0

    return [
        forward,
        lambda: backward(True, False, False),
        lambda: backward(False, True, False),
    ]


def others() -> dict[str, Callable[[Case], list[Any]]]:
    found: dict[str, Callable[[Case], list[Any]]] = {}
    if "Equinox" in LIBRARIES:
        found["Equinox"] = lambda case: of_library(LIBRARIES["Equinox"], case)
    for name, module, make in (
        ("Flax NNX", "flax.nnx", of_nnx),
        ("PyTorch", "torch", of_torch),
    ):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        found[name] = lambda case, make=make, library=library: make(library, case)
    return found


OTHERS = others()
# Equinox's layers call the convolution of JAX: it is the first column.
ORDERED = sorted(LIBRARIES.items())


def unet(library: Any) -> Any:
    """Two levels of two convolutions each, with skip connections."""
    nn = library.nn

    class UNet(library.Module):
        down: list
        up: list
        last: Any

        def __init__(self, key: Any):
            keys = iter(jax.random.split(key, 8))

            def conv(before: int, after: int) -> Any:
                return nn.Conv2d(before, after, 3, padding=1, key=next(keys))

            self.down = [conv(3, 16), conv(16, 32), conv(32, 64)]
            self.up = [
                (nn.ConvTranspose2d(64, 32, 2, 2, key=next(keys)), conv(64, 32)),
                (nn.ConvTranspose2d(32, 16, 2, 2, key=next(keys)), conv(32, 16)),
            ]
            self.last = nn.Conv2d(16, 3, 1, key=next(keys))

        def __call__(self, x: jax.Array) -> jax.Array:
            kept = []
            for layer in self.down:
                if kept:
                    n, width, height = x.shape
                    x = x.reshape(n, width // 2, 2, height // 2, 2).max((2, 4))
                x = jax.nn.relu(layer(x))
                kept.append(x)
            for (wider, layer), skip in zip(self.up, kept[-2::-1], strict=True):
                x = jax.nn.relu(layer(jnp.concatenate([wider(x), skip])))
            return self.last(x)

    return UNet(KEY)


def convnext(library: Any) -> Any:
    nn = library.nn

    class Block(library.Module):
        depthwise: Any
        norm: Any
        wide: Any
        narrow: Any

        def __init__(self, key: Any):
            keys = jax.random.split(key, 3)
            options = {"padding": 3, "groups": 96}
            self.depthwise = nn.Conv2d(96, 96, 7, key=keys[0], **options)
            self.norm = nn.GroupNorm(1, 96)
            self.wide = nn.Conv2d(96, 384, 1, key=keys[1])
            self.narrow = nn.Conv2d(384, 96, 1, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.norm(self.depthwise(x))
            return x + self.narrow(jax.nn.gelu(self.wide(y)))

    return Block(KEY)


def step(library: Any, model: Any, x: jax.Array) -> Callable[[], Any]:
    """The loss of a batch and its gradient."""
    arrays, static = library.partition(model, library.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        return (jax.vmap(library.combine(arrays, static))(x) ** 2).mean()

    program = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(program(arrays, x))


UNET = unet, jax.random.normal(KEY, (8, 3, 32, 32))
CONVNEXT = convnext, jax.random.normal(KEY, (8, 96, 14, 14))
