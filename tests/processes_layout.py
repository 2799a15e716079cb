"""Run by `test_layout.py` in several processes, which train one model together."""

import sys

import jax
import layout_net as t
import numpy as np


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as e:
        return str(e)
    raise AssertionError("nothing was raised")


def main(address, processes, number):
    jax.distributed.initialize(address, processes, number)
    layout = t.layout_of("data=-1,model=2")
    key = jax.random.key(0)
    model, state = layout.init(t.make, key)
    step = layout.jit(t.train, donate=("model", "state"))
    size = t.BATCH // processes
    own = slice(number * size, (number + 1) * size)
    losses = []
    for i in range(3):
        batch = layout.batch(tuple(x[own] for x in t.rows(i)))
        model, state, value = step(model, state, *batch)
        losses.append(float(value))

    # What differs between processes, or is of this one alone, is an error in each.
    text = error_of(step, model, state, *t.rows())
    assert "`x`" in text and "layout.batch" in text, text
    text = error_of(layout.init, t.make, jax.random.key(number))
    assert "`key` is not the same in all processes" in text, text
    shapes = {"x": np.ones((4 + 4 * number, t.WIDTH), "float32")}
    text = error_of(layout.batch, shapes)
    assert "`rows['x']`" in text, text
    # A layout on the devices of this process takes its arrays.
    own_layout = t.layout_of(
        jax.make_mesh((1, 2), ("data", "model"), devices=jax.local_devices())
    )
    rows = own_layout.batch(np.ones((2, t.WIDTH), "float32"))
    assert own_layout.jit(lambda x: 2 * x)(rows).is_fully_addressable
    print(*losses)


main(sys.argv[1], *map(int, sys.argv[2:]))
