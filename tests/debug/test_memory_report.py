"""`debug.memory_report`: its numbers are XLA's, by leaf, and nothing runs."""

import jax
import jax.numpy as jnp
import matplotlib
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import equinox_like as eqx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

optimiser = optax.adam(1e-3)


def step(model, opt_state, x):
    def loss(model):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    updates, opt_state = optimiser.update(eqx.filter_grad(loss)(model), opt_state)
    return eqx.apply_updates(model, updates), opt_state


def arguments():
    model = eqx.nn.MLP(4, 4, 16, 1, key=jax.random.key(0))
    return model, optimiser.init(eqx.filter(model, eqx.trainable)), jnp.ones((8, 4))


def totals(memory):
    return (
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


@pytest.fixture(scope="module")
def report():
    return eqx.debug.memory_report(
        eqx.filter_jit(step, donate=("model", "opt_state")), *arguments()
    )


def test_totals_are_those_of_xla_with_and_without_donation(report):
    for donate, part in (
        (("model", "opt_state"), report.with_donation),
        ("none", report.without_donation),
    ):
        compiled = eqx.filter_jit(step, donate=donate).lower(*arguments()).compile()
        assert tuple(part.memory) == totals(compiled.memory_analysis())
    assert report.with_donation.memory.aliased > 0
    assert report.without_donation.memory.aliased == 0


def test_leaves_add_up_to_the_totals(report):
    part = report.with_donation
    assert sum(row.bytes for row in part.rows) == part.memory.arguments
    # XLA counts a table of 8 bytes for each output, too.
    tables = 8 * len(part.outputs)
    assert sum(row.bytes for row in part.outputs) + tables == part.memory.outputs


def test_nothing_runs_and_nothing_is_deleted():
    args = arguments()
    eqx.debug.memory_report(eqx.filter_jit(step, donate="all"), *args)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args) if eqx.is_array(x))


def test_function_that_donates_nothing_is_compared_with_donating_all():
    for fun in (step, eqx.filter_jit(step)):
        report = eqx.debug.memory_report(fun, *arguments())
        outcomes = {row.path: row.outcome for row in report.with_donation.rows}
        assert outcomes["model.layers[0].weight"] == "aliased"
        assert outcomes["x"] == "unusable"
        plain = {row.outcome for row in report.without_donation.rows}
        assert plain == {"kept"}


def test_method_is_reported_with_its_self():
    class Model(eqx.Module):
        w: jax.Array

        @eqx.filter_jit(donate="all")
        def step(self, x):
            return eqx.tree_at(lambda m: m.w, self, self.w + x)

    report = eqx.debug.memory_report(Model(jnp.ones(3)).step, 1.0)
    assert [row.path for row in report.with_donation.rows] == ["self.w"]


def test_struct_stands_for_an_array():
    report = eqx.debug.memory_report(
        lambda x: x + 1, jax.ShapeDtypeStruct((4,), jnp.float32)
    )
    assert report.with_donation.memory.arguments == 16


def test_table_names_leaves_and_totals(report):
    text = str(report)
    head, *lines = text.splitlines()
    assert head.startswith("Memory of one call of <filter_jit of step")
    peaks = (
        f"{report.without_donation.peak_bytes:,}",
        f"{report.with_donation.peak_bytes:,}",
    )
    assert next(x for x in lines if x.startswith("peak")).split()[1:] == list(peaks)
    (row,) = (x for x in lines if x.startswith("model.layers[0].weight "))
    assert row.split(maxsplit=3)[1:] == [
        "float32[16,4]" if "[16,4]" in row else "float32[4,16]",
        "256",
        "aliased with output[0].layers[0].weight",
    ]


def test_tree_sums_up_along_the_paths(report):
    lines = dict(x.rsplit(maxsplit=1) for x in report.tree(depth=1).splitlines())
    lines = {name.strip(): int(size.replace(",", "")) for name, size in lines.items()}
    rows = report.with_donation.rows
    model = sum(row.bytes for row in rows if row.path.startswith("model"))
    assert lines["model"] == model and lines["x"] == 8 * 4 * 4
    assert lines["peak"] == report.with_donation.peak_bytes
    whole = report.tree().splitlines()
    assert "      [0]" in {x[:9].rstrip() for x in whole}
    assert len(whole) > len(lines)


def test_key_of_a_dictionary_with_dots_is_one_step_of_the_tree():
    tree = eqx.debug.memory_report(lambda d: d, {"a.b[0]": jnp.ones(2)}).tree()
    assert "    ['a.b[0]']" in tree.splitlines()[2]


def test_bars_of_the_picture_are_as_long_as_the_peaks(report):
    ax = report.plot()
    ends = {}
    for bar in ax.patches:
        y = bar.get_y()
        ends[y] = max(ends.get(y, 0), bar.get_x() + bar.get_width())
    with_donation, without = (1024 * ends[y] for y in sorted(ends))
    assert with_donation == pytest.approx(report.with_donation.peak_bytes)
    assert without == pytest.approx(report.without_donation.peak_bytes)
    plt.close(ax.figure)


def test_unused_argument_is_not_in_the_picture():
    report = eqx.debug.memory_report(lambda x, unused: x + 1, jnp.ones(4), jnp.ones(8))
    ax = report.plot()
    assert "unused" not in ax.get_legend_handles_labels()[1]
    plt.close(ax.figure)


def test_bytes_of_sharded_arrays_are_those_on_one_device():
    mesh = jax.make_mesh((4,), ("data",))
    x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    report = eqx.debug.memory_report(lambda x: x + 1, x)
    assert report.with_donation.rows[0].bytes == 2 * 4 * 4
    assert report.with_donation.memory.arguments == 2 * 4 * 4
