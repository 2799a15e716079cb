"""Which steps of a checkpointed loop are saved, and which are done again."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equinox_like import internal as eqxi
from equinox_like._loops.checkpointed import Online, default_checkpoints

# By the number of checkpoints and of steps: which steps are done on the way back.
ORDERS = {
    (1, 4): "0 1 2 3 0 1 2 0 1 0",
    (2, 2): "1 0",
    (2, 4): "3 0 1 2 1 0",
    (2, 6): "5 0 1 2 3 4 2 3 2 0 1 0",
    (3, 4): "2 3 2 1 0",
    (3, 6): "5 4 0 1 2 3 2 1 0",
    (3, 9): "7 8 7 4 5 6 5 4 0 1 2 3 2 1 0",
    (3, 12): "11 10 0 1 2 3 4 5 6 7 8 9 7 8 7 5 6 5 0 1 2 3 4 3 2 0 1 0",
    (4, 15): "14 9 10 11 12 13 11 12 11 9 10 9 5 6 7 8 7 6 5 0 1 2 3 4 3 2 1 0",
    (5, 8): "7 6 3 4 5 4 3 2 0 1 0",
}


def order_of(steps, checkpoints, max_steps=None):
    """Of which steps the body is evaluated, all in all."""
    gradient, done = compiled_gradient(checkpoints, max_steps)
    done.clear()
    jax.block_until_ready(gradient(1.0, steps))
    jax.effects_barrier()
    return list(done)


@functools.cache
def compiled_gradient(checkpoints, max_steps):
    """For any number of steps, which the program does not know."""
    done = []

    def body(carry):
        i, x = carry
        jax.debug.callback(lambda i: done.append(int(i)), i, ordered=False)
        return i + 1, jnp.sin(x)

    def run(x, steps):
        return eqxi.while_loop(
            lambda c: c[0] < steps,
            body,
            (0, x),
            kind="checkpointed",
            checkpoints=checkpoints,
            max_steps=max_steps,
        )[1]

    return jax.jit(jax.grad(run)), done


@pytest.mark.parametrize("checkpoints, steps", ORDERS, ids=str)
@pytest.mark.parametrize("limited", [False, True], ids=["condition", "max_steps"])
def test_steps_are_done_again_in_the_order_of_the_literature(
    checkpoints, steps, limited
):
    options = {"max_steps": steps} if limited else {}
    given = 100 if limited else steps
    found = order_of(given, checkpoints, **options)
    again = [int(i) for i in ORDERS[checkpoints, steps].split()]
    assert found == [*range(steps), *again]


def test_nothing_is_done_again_if_every_step_is_saved():
    assert order_of(5, max_steps=5, checkpoints=9) == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


def test_default_is_the_least_number_with_which_no_step_is_done_more_than_twice():
    limits = 1, 2, 3, 6, 10, 100, 1000
    assert [*map(default_checkpoints, limits)] == [1, 1, 2, 3, 4, 13, 44]


@pytest.mark.parametrize("limited", [False, True], ids=["unlimited", "rounds only"])
@pytest.mark.parametrize("checkpoints", range(1, 8))
def test_steps_are_saved_as_in_the_literature(checkpoints, limited):
    rounds_end = (checkpoints + 1) * (checkpoints + 2) // 2 - 1
    max_steps = rounds_end if limited else None
    online = Online(checkpoints, max_steps)
    save, marks = jax.jit(online.save), jax.jit(online.saved_steps)
    progress = online.start()
    for step, kept in enumerate(saved_steps(checkpoints, max_steps or 3 * rounds_end)):
        progress, _, _ = save(progress, step)
        found = marks(progress, step + 1)
        assert found.steps[: found.count].tolist() == kept


def saved_steps(c, steps):
    """The saved steps after each step, by the algorithms as published."""
    rounds_end = (c + 1) * (c + 2) // 2 - 1
    kept, levels, rounds, anchor = [], [], 0, c + 1
    for step in range(steps):
        level, position = 0, rounds  # of what is dropped
        if step < c:
            position = None
        elif step >= rounds_end:
            lower = [i for i in range(1, c) if levels[i] + 2 <= max(levels[i:])]
            position = lower[-1] if lower else c - 1
            level = 0 if lower else levels[-1] + 1
        elif step == anchor - 1:
            yield [*kept]
            continue
        elif step == anchor:
            rounds, position = rounds + 1, c - 1
            anchor += c + 1 - rounds
        if position != 0:  # the first step is kept
            if position is not None:
                del kept[position], levels[position]
            kept.append(step)
            levels.append(level)
        yield [*kept]


@pytest.mark.parametrize("checkpoints", range(1, 5))
def test_no_step_is_done_again_more_than_once_in_the_rounds(checkpoints):
    for steps in range(1, (checkpoints + 1) * (checkpoints + 2) // 2):
        done = order_of(steps, checkpoints)
        assert max(map(done.count, done)) <= 3  # forward, again, and differentiated


@pytest.mark.parametrize("checkpoints", [1, 2, 4, 7])
def test_slots_hold_the_steps_that_they_are_said_to(checkpoints):
    online = Online(checkpoints, None)
    save = jax.jit(online.save)
    progress, slots = online.start(), {}
    for step in range(60):
        progress, slot, is_saved = save(progress, step)
        if is_saved:
            slots[int(slot)] = step
        marks = online.saved_steps(progress, step + 1)
        count = int(marks.count)
        assert count == min(step + 1, checkpoints)
        assert sorted(marks.slots.tolist()) == [*range(checkpoints)]
        kept = marks.steps[:count].tolist()
        assert kept[0] == 0 and kept == sorted(set(kept))
        assert [slots[i] for i in marks.slots[:count].tolist()] == kept
