"""A step of a checkpointed loop costs the same for any number of checkpoints."""

import re

import jax
import jax.numpy as jnp
import pytest

import equinox_like as eqx
from equinox_like import internal as eqxi

CHECKPOINTS = 1237  # a size that no other array has
STEPS = 3000
OPTIONS = {"kind": "checkpointed", "checkpoints": CHECKPOINTS}


def step(carry):
    i, x = carry
    return i + 1, jnp.sin(x)


def loop(x, steps=STEPS):
    return eqxi.while_loop(lambda c: c[0] < steps, step, (0, x), **OPTIONS)[1]


def limited(x):
    return eqxi.while_loop(lambda c: True, step, (0, x), max_steps=STEPS, **OPTIONS)[1]


def public(x):
    return eqx.filter_while_loop(
        lambda c: c[0] < STEPS, step, (jnp.asarray(0), x), **OPTIONS
    )[1]


def scan(x):
    def once(x, row):
        return jnp.sin(x) + row, x

    return eqx.filter_scan(once, x, jnp.ones((STEPS, 4)), checkpoint=CHECKPOINTS)[1]


def with_buffer(x):
    def write(carry):
        i, x, xs = carry
        return i + 1, jnp.sin(x) + xs[i - 1], xs.at[i].set(x)

    return eqxi.while_loop(
        lambda carry: carry[0] < STEPS,
        write,
        (1, x, jnp.zeros((STEPS, 4))),
        buffers=lambda carry: carry[2],
        **OPTIONS,
    )[2]


def batch(x):
    return jnp.stack([x, 2 * x, 3 * x])


def some_end_early(x):
    return jax.vmap(loop)(batch(x), jnp.asarray([5, STEPS, 7]))


def linearised(x):
    out, linear = jax.linearize(loop, x)
    return jax.linear_transpose(linear, x)(out)[0]


def gradient_of(f):
    return jax.grad(lambda x: f(x).sum())


PROGRAMS = {
    "condition": gradient_of(loop),
    "max_steps": gradient_of(limited),
    "filter_while_loop": gradient_of(public),
    "filter_scan": gradient_of(scan),
    "buffer": gradient_of(with_buffer),
    "vmap": gradient_of(lambda x: jax.vmap(loop)(batch(x))),
    "vmap, buffer": gradient_of(lambda x: jax.vmap(with_buffer)(batch(x))),
    "vmap of steps": gradient_of(some_end_early),
    "vmap of gradient": lambda x: jax.vmap(gradient_of(loop))(batch(x)),
    "linearize": linearised,
    "jacrev": jax.jacrev(loop),
}
each_program = pytest.mark.parametrize(
    "program", PROGRAMS.values(), ids=PROGRAMS.keys()
)


@each_program
def test_a_step_only_updates_elements_of_the_arrays_of_checkpoints(program):
    closed = jax.make_jaxpr(program)(jnp.ones(4))
    found = {*operations_on_whole(closed.jaxpr, within_loop=False)}
    assert "dynamic_update_slice" in found
    assert found <= {"dynamic_update_slice", "scatter"}  # the latter under `jax.vmap`


def is_program(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def operations_on_whole(jaxpr, within_loop):
    """The operations within loops that return arrays with all checkpoints."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        programs = [
            getattr(x, "jaxpr", x)
            for x in jax.tree.leaves(
                equation.params,
                is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns"),
            )
            if hasattr(getattr(x, "jaxpr", x), "eqns")
        ]
        for program in programs:
            yield from operations_on_whole(program, within_loop or name == "while")
        if within_loop and not programs:
            if any(CHECKPOINTS in v.aval.shape for v in equation.outvars):
                yield name


@each_program
def test_checkpoints_are_written_in_place(program):
    text = jax.jit(program).lower(jnp.ones(4)).compile().as_text()
    bodies = set(re.findall(r"body=(%[\w.-]+)", text))
    programs = computations(text)
    whole = re.compile(rf"= \w+\[(?:\d+,)*{CHECKPOINTS}[,\]]\S* ([\w-]+)\(")
    passed_on = {"get-tuple-element", "parameter", "bitcast", "dynamic-update-slice"}
    updated = 0
    for name in bodies:
        for line in programs[name]:
            operation = whole.search(line)
            if operation is None or operation[1] in passed_on:
                continue
            assert operation[1] == "fusion", line
            called = programs[re.search(r"calls=(%[\w.-]+)", line)[1]]
            (root,) = (x for x in called if x.startswith("ROOT"))
            assert "dynamic-update-slice" in root, [line, *called]
            updated += 1
    assert bodies and updated


def computations(text):
    """The lines of each computation of a compiled program, by its name."""
    found = {}
    for line in text.splitlines():
        head = re.match(r"(?:ENTRY )?(%[\w.-]+) \(", line)
        if head:
            lines = found[head[1]] = []
        elif line.startswith(" "):
            lines.append(line.strip())
    return found


@pytest.mark.parametrize("checkpoints", [10, 1000])
def test_memory_is_that_of_the_checkpoints(checkpoints):
    def run(x):
        options = {"kind": "checkpointed", "checkpoints": checkpoints}
        return eqxi.while_loop(lambda c: c[0] < STEPS, step, (0, x), **options)[1].sum()

    x = jnp.ones(1000)
    compiled = jax.jit(jax.grad(run)).lower(x).compile()
    copies = compiled.memory_analysis().temp_size_in_bytes / x.nbytes
    assert copies < 1.02 * checkpoints + 5


def test_there_may_be_more_checkpoints_than_an_int32_counts_steps_for():
    def run(x):
        options = {"kind": "checkpointed", "checkpoints": 70_000}
        return eqxi.while_loop(lambda c: c[0] < 9, step, (0, x), **options)[1]

    by_jax = jax.grad(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(x), x))
    assert jnp.allclose(jax.jit(jax.grad(run))(1.0), by_jax(1.0))


def count(jaxpr, name):
    """How many equations of this name there are, also in nested programs."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name
        for x in jax.tree.leaves(equation.params, is_leaf=is_program):
            found += count(getattr(x, "jaxpr", x), name) if is_program(x) else 0
    return found


@pytest.mark.parametrize("run", [eqxi.while_loop, eqx.filter_while_loop])
@pytest.mark.parametrize("checkpoints", [5, 6, 100])
def test_a_loop_that_saves_every_step_has_no_program_to_recompute_one(run, checkpoints):
    def power(x):
        options = {"kind": "checkpointed", "max_steps": 5, "checkpoints": checkpoints}
        return run(lambda c: c[0] < 3, step, (jnp.asarray(0), x), **options)[1]

    jaxpr = jax.make_jaxpr(jax.grad(power))(1.0).jaxpr
    assert count(jaxpr, "while") == 2  # there and back
    assert count(jaxpr, "sin") == 2  # there, and before the derivative
    by_hand = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))
    assert jax.jit(jax.grad(power))(1.0) == by_hand(1.0)


def solve(x):
    """As a solver of differential equations: stages within steps, and outputs between."""

    def stage(carry):
        i, x, ks = carry
        return i + 1, x, ks.at[i].set(jnp.sin(x + ks[i - 1]))

    def output(carry):
        i, x, ys = carry
        return i + 1, x, ys.at[i].set(2 * x)

    def inner(body, size, init):
        return eqxi.while_loop(
            lambda carry: carry[0] < size,
            body,
            init,
            kind="checkpointed",
            max_steps=size,
            checkpoints=size,
            buffers=lambda carry: carry[2],
        )

    def outer(carry):
        i, x, ys = carry
        _, _, ks = inner(stage, 4, (1, x, jnp.zeros((4, *x.shape))))
        x = x + 0.1 * ks.sum(0)
        return i + 1, x, inner(output, 6, (i % 3, x, ys))[2]

    init = 0, x, jnp.zeros((6, *x.shape))
    options = {"kind": "checkpointed", "max_steps": 64}
    return eqxi.while_loop(lambda c: c[1].sum() < 9, outer, init, **options)[2].sum()


def test_a_loop_in_a_loop_is_in_the_program_once_for_each_time_that_it_runs():
    jaxpr = jax.make_jaxpr(jax.grad(solve))(jnp.ones(3)).jaxpr
    # Of the outer loop: there, the order of the saved steps, back, and recomputed. Of each
    # inner loop: there, recomputed, there and back for the derivative.
    assert count(jaxpr, "while") == 4 + 2 * 4
    assert count(jaxpr, "sin") == 4
