"""`python -m benchmarks.torch_values`: compares values and gradients with torch.nn.

A separate job, for an environment with PyTorch (`pip install torch`). Both libraries
get the same parameters and inputs, rounded to the dtype. PyTorch computes in float64,
and this library in the dtype, under `jax.jit` and `jax.vmap`. Each figure is the
largest difference in an array, divided by its largest absolute value or by 1, whichever
is larger. The exit status is 1 if a figure is too large.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import equinox_like as eqx

jax.config.update("jax_enable_x64", True)

KEY = jax.random.key(0)
BATCH = 5
# In bfloat16 all figures are within 0.01, except for the biases of convolutions. These
# are broadcast, so their gradient is a sum, in which XLA on the CPU rounds after each
# term.
LIMITS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 0.1}
Get = Callable[[str], np.ndarray]


@dataclass
class Case:
    """A layer of both libraries.

    `where` returns our parameters. `values` returns the same parameters of PyTorch,
    from a function that reads one by name. Both are also used for gradients.
    """

    name: str
    ours: Any
    theirs: torch.nn.Module
    shape: tuple[int, ...]
    where: Callable[[Any], Sequence[Any]] = lambda m: (m.weight, m.bias)
    values: Callable[[Get], Sequence[np.ndarray]] = lambda get: (
        get("weight"),
        get("bias"),
    )
    call: Callable[[Any, Any], Any] = lambda m, x: m(x)
    call_theirs: Callable[[Any, Any], Any] = lambda m, x: m(x)
    # PyTorch's second biases, which our layer does not have.
    zeroed: Callable[[Any], Sequence[torch.Tensor]] = lambda m: ()
    takes_batches: bool = False
    # For layers that take an index: the number of indices.
    indices: int = 0


def conv(n: int, **options: Any) -> Case:
    ours = getattr(eqx.nn, f"Conv{n}d")
    theirs = getattr(torch.nn, f"Conv{n}d")
    other = dict(options)
    if "padding_mode" in other:
        other["padding_mode"] = other["padding_mode"].upper()
    name = ", ".join([f"Conv{n}d", *(f"{k}={v}" for k, v in options.items())])
    return Case(
        name,
        ours(4, 6, 3, key=KEY, **other),
        theirs(4, 6, 3, **options),
        (4, *(9, 8, 7)[:n]),
        values=lambda get: (get("weight"), get("bias").reshape(-1, *(1,) * n)),
    )


def conv_transpose(n: int, **options: Any) -> Case:
    ours = getattr(eqx.nn, f"ConvTranspose{n}d")
    theirs = getattr(torch.nn, f"ConvTranspose{n}d")
    space = tuple(range(2, n + 2))
    name = ", ".join([f"ConvTranspose{n}d", *(f"{k}={v}" for k, v in options.items())])
    return Case(
        name,
        ours(4, 6, 3, key=KEY, **options),
        theirs(4, 6, 3, **options),
        (4, *(6, 5, 4)[:n]),
        # PyTorch's kernel has the shape (in, out, ...), and is flipped in space.
        values=lambda get: (
            np.flip(get("weight").swapaxes(0, 1), space),
            get("bias").reshape(-1, *(1,) * n),
        ),
    )


def pool(name: str, *args: Any, **options: Any) -> Case:
    n = int(name[-2])
    shown = ", ".join([*map(str, args), *(f"{k}={v}" for k, v in options.items())])
    return Case(
        f"{name}, {shown}",
        getattr(eqx.nn, name)(*args, **options),
        getattr(torch.nn, name)(*args, **options),
        (3, *(12, 8, 4)[:n]),
        where=lambda m: (),
        values=lambda get: (),
    )


def cases() -> list[Case]:
    torch.manual_seed(0)
    return [
        Case("Linear", eqx.nn.Linear(5, 3, key=KEY), torch.nn.Linear(5, 3), (5,)),
        Case(
            "MLP",
            eqx.nn.MLP(5, 3, 7, 2, key=KEY),
            torch.nn.Sequential(
                torch.nn.Linear(5, 7),
                torch.nn.ReLU(),
                torch.nn.Linear(7, 7),
                torch.nn.ReLU(),
                torch.nn.Linear(7, 3),
            ),
            (5,),
            where=lambda m: [
                p for layer in m.layers for p in (layer.weight, layer.bias)
            ],
            values=lambda get: [
                get(f"{i}.{kind}") for i in (0, 2, 4) for kind in ("weight", "bias")
            ],
        ),
        *(conv(n) for n in (1, 2, 3)),
        conv(2, stride=2, padding=1),
        conv(2, dilation=2, groups=2),
        conv(2, padding=2, padding_mode="circular"),
        conv(2, padding=2, padding_mode="reflect"),
        conv(2, padding=2, padding_mode="replicate"),
        *(conv_transpose(n) for n in (1, 2, 3)),
        conv_transpose(2, stride=2, padding=1, output_padding=1),
        conv_transpose(2, dilation=2),
        Case("LayerNorm", eqx.nn.LayerNorm((6,)), torch.nn.LayerNorm((6,)), (6,)),
        Case(
            "RMSNorm",
            eqx.nn.RMSNorm((6,), eps=1e-5, use_bias=False),
            torch.nn.RMSNorm((6,), eps=1e-5),
            (6,),
            where=lambda m: (m.weight,),
            values=lambda get: (get("weight"),),
        ),
        Case("GroupNorm", eqx.nn.GroupNorm(2, 6), torch.nn.GroupNorm(2, 6), (6, 4, 5)),
        Case(
            "BatchNorm, training",
            eqx.nn.BatchNorm(3),
            torch.nn.BatchNorm2d(3),
            (3, 4, 5),
            call=lambda m, x: m(x, eqx.nn.State(m))[0],
            takes_batches=True,
        ),
        Case(
            "Embedding",
            eqx.nn.Embedding(7, 4, key=KEY),
            torch.nn.Embedding(7, 4),
            (),
            where=lambda m: (m.weight,),
            values=lambda get: (get("weight"),),
            indices=7,
        ),
        Case(
            "GRUCell",
            eqx.nn.GRUCell(5, 4, key=KEY),
            torch.nn.GRUCell(5, 4),
            (9,),
            where=lambda m: (m.weight_ih, m.weight_hh, m.bias, m.bias_n),
            values=lambda get: (
                get("weight_ih"),
                get("weight_hh"),
                get("bias_ih"),
                get("bias_hh")[8:],
            ),
            call=lambda m, x: m(x[:5], x[5:]),
            call_theirs=lambda m, x: m(x[:, :5], x[:, 5:]),
            zeroed=lambda m: [m.bias_hh[:8]],
        ),
        Case(
            "LSTMCell",
            eqx.nn.LSTMCell(5, 4, key=KEY),
            torch.nn.LSTMCell(5, 4),
            (13,),
            where=lambda m: (m.weight_ih, m.weight_hh, m.bias),
            values=lambda get: (get("weight_ih"), get("weight_hh"), get("bias_ih")),
            call=lambda m, x: jnp.concatenate(m(x[:5], (x[5:9], x[9:]))),
            call_theirs=lambda m, x: torch.cat(
                m(x[:, :5], (x[:, 5:9], x[:, 9:])), dim=1
            ),
            zeroed=lambda m: [m.bias_hh],
        ),
        Case(
            "MultiheadAttention",
            eqx.nn.MultiheadAttention(2, 8, key=KEY),
            torch.nn.MultiheadAttention(8, 2, bias=False),
            (6, 8),
            where=lambda m: [
                p.weight
                for p in (m.query_proj, m.key_proj, m.value_proj, m.output_proj)
            ],
            values=lambda get: (
                *np.split(get("in_proj_weight"), 3),
                get("out_proj.weight"),
            ),
            call=lambda m, x: m(x, x, x),
            call_theirs=lambda m, x: torch.stack([m(row, row, row)[0] for row in x]),
        ),
        *(pool(f"AvgPool{n}d", 2, stride=2) for n in (1, 2, 3)),
        *(pool(f"MaxPool{n}d", 2, stride=2) for n in (1, 2, 3)),
        pool("MaxPool2d", 3, stride=2, padding=1),
        *(pool(f"AdaptiveAvgPool{n}d", 2) for n in (1, 2, 3)),
        *(pool(f"AdaptiveMaxPool{n}d", 2) for n in (1, 2, 3)),
        Case(
            "PReLU",
            eqx.nn.PReLU(),
            torch.nn.PReLU(),
            (6,),
            where=lambda m: (m.negative_slope,),
            values=lambda get: (get("weight").reshape(()),),
        ),
    ]


def rounded(x: Any, dtype: str) -> np.ndarray:
    return np.array(jnp.asarray(x).astype(dtype).astype("float64"))


def errors(case: Case, dtype: str) -> tuple[float, float]:
    """The largest relative difference of the output, and of the gradients."""
    theirs = case.theirs.double()
    theirs.zero_grad()
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            # Not the initial values, since some parameters are all 1 or 0.
            drawn = parameter.numpy() + 0.1 * random.normal(size=parameter.shape)
            parameter.copy_(torch.from_numpy(rounded(drawn, dtype)))
        for part in case.zeroed(theirs):
            part.zero_()
    parameters = dict(theirs.named_parameters())
    if case.indices:
        x = random.integers(case.indices, size=(BATCH, *case.shape))
    else:
        x = rounded(random.normal(size=(BATCH, *case.shape)), dtype)
    model = case.ours
    if parameters:
        values = case.values(lambda name: parameters[name].detach().numpy())
        model = eqx.tree_at(case.where, model, [jnp.asarray(v, dtype) for v in values])

    their_x = torch.from_numpy(x)
    if not case.indices:
        their_x.requires_grad_()
    out = case.call_theirs(theirs, their_x)
    weights = rounded(random.normal(size=tuple(out.shape)), dtype)
    (out * torch.from_numpy(weights)).sum().backward()

    def loss(model: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        call = lambda x: case.call(model, x)  # noqa: E731
        out = call(x) if case.takes_batches else jax.vmap(call)(x)
        return (out.astype("float64") * weights).sum(), out

    our_x = jnp.asarray(x) if case.indices else jnp.asarray(x, dtype)
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    argnums = (0,) if case.indices else (0, 1)
    gradient = jax.grad(
        lambda arrays, x: loss(eqx.combine(arrays, rest), x), argnums, has_aux=True
    )
    gradients, our_out = jax.jit(gradient)(arrays, our_x)

    pairs = []
    if parameters:
        found = case.where(eqx.combine(gradients[0], rest))
        wanted = case.values(lambda name: parameters[name].grad.numpy())
        pairs += list(zip(found, wanted, strict=True))
    if not case.indices:
        pairs.append((gradients[1], their_x.grad.numpy()))
    assert our_out.dtype == dtype
    return (
        difference(our_out, out.detach().numpy()),
        max(difference(a, b) for a, b in pairs),
    )


def difference(ours: Any, theirs: np.ndarray) -> float:
    ours = np.asarray(jnp.asarray(ours).astype("float64"))
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(1, np.abs(theirs).max()))


def main() -> None:
    print(f"torch {torch.__version__}, jax {jax.__version__}")
    print(f"{'value, gradient':54}" + "".join(f"{dtype:>20}" for dtype in LIMITS))
    failed = []
    for case in cases():
        shown = f"{case.name:54}"
        for dtype, limit in LIMITS.items():
            found = errors(case, dtype)
            shown += f"{found[0]:>10.0e}{found[1]:>10.0e}"
            if not max(found) <= limit:
                failed.append(f"{case.name}, {dtype}")
        print(shown)
    if failed:
        sys.exit(f"Differ by more than {LIMITS}: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
