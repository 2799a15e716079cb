"""`donation_report`: what it says is what then happens."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import equinox_like as eqx


def outcomes(report):
    return {row.path: row.outcome for row in report.rows}


def step(model, opt, key, batch, ignored, rate):
    model = jax.tree.map(
        lambda p: p - rate * batch.sum() if eqx.is_array(p) else p, model
    )
    return {"model": model, "name": "first"}, jax.random.split(key)[0], opt["m"] + 1


def arguments():
    return (
        eqx.nn.Linear(2, 3, key=jax.random.key(0)),
        {"m": jnp.ones((3, 3)), "host": np.ones(3, np.float32)},
        jax.random.key(1),
        jnp.ones((8, 2)),
        jnp.ones(4),
        0.1,
    )


def test_each_array_has_a_row_that_says_what_becomes_of_it():
    report = eqx.filter_jit(step, donate="arrays").donation_report(*arguments())
    assert [row[:4] for row in report.rows] == [
        ("model.weight", (3, 2), jnp.float32, 24),
        ("model.bias", (3,), jnp.float32, 12),
        ("opt['host']", (3,), np.float32, 12),
        ("opt['m']", (3, 3), jnp.float32, 36),
        ("key", (), jax.random.key(0).dtype, 8),
        ("batch", (8, 2), jnp.float32, 64),
        ("ignored", (4,), jnp.float32, 16),
    ]
    assert outcomes(report) == {
        "model.weight": "aliased",
        "model.bias": "aliased",
        "opt['host']": "kept",
        "opt['m']": "aliased",
        "key": "aliased",
        "batch": "unusable",
        "ignored": "unused",
    }
    rows = {row.path: row for row in report.rows}
    assert rows["model.weight"].output == "output[0]['model'].weight"
    assert rows["opt['m']"].output == "output[2]"
    assert rows["batch"].reason == "no output of that size is left"
    assert "NumPy" in rows["opt['host']"].reason
    assert report.donated_bytes == 24 + 12 + 36 + 8 + 64 + 16


def test_report_tells_what_then_happens():
    f = eqx.filter_jit(step, donate="arrays")
    args = arguments()
    report = f.donation_report(*args)
    assert not any(
        x.is_deleted()
        for x in jax.tree.leaves(args)
        if eqx.is_array(x) and not isinstance(x, np.ndarray)
    )
    f(*args)
    model, opt, key, batch, ignored, _ = args
    gone = {
        "model.weight": model.weight,
        "model.bias": model.bias,
        "opt['m']": opt["m"],
        "key": key,
        "batch": batch,
        "ignored": ignored,
    }
    told = outcomes(report)
    assert {name: x.is_deleted() for name, x in gone.items()} == {
        name: told[name] == "aliased" for name in gone
    }
    aliased = sum(row.bytes for row in report.rows if row.outcome == "aliased")
    assert report.aliased_bytes == aliased


def test_totals_are_those_of_xla():
    f = eqx.filter_jit(step, donate="arrays")
    report = f.donation_report(*arguments())
    memory = f.lower(*arguments()).compile().memory_analysis()
    assert report.aliased_bytes == memory.alias_size_in_bytes
    assert report.temporary_bytes == memory.temp_size_in_bytes
    assert report.peak_bytes == (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert [(row.path, row.bytes) for row in report.outputs] == [
        ("output[0]['model'].weight", 24),
        ("output[0]['model'].bias", 12),
        ("output[1]", 8),
        ("output[2]", 36),
    ]


def test_buffer_that_xla_may_use_as_it_likes_is_a_donor():
    f = eqx.filter_jit(jax.random.normal, donate="arrays")
    assert outcomes(f.donation_report(jax.random.key(0))) == {"key": "donor"}


@pytest.mark.parametrize("donate", ["none", "all-except-first"])
def test_what_is_not_donated_is_kept(donate):
    f = eqx.filter_jit(lambda x: x + 1, donate=donate)
    report = f.donation_report(jnp.ones(3))
    assert outcomes(report) == {"x": "kept"}
    assert report.donated_bytes == report.aliased_bytes == 0


@pytest.mark.parametrize("donate", ["strict", "warn", ("x",)])
def test_no_mode_objects_to_a_report(donate):
    f = eqx.filter_jit(lambda x: x.sum(), donate=donate)
    x = jnp.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outcomes(f.donation_report(x)) == {"x": "unusable"}
    assert not x.is_deleted()


def test_struct_may_stand_for_an_array_and_statics_may_be_returned():
    f = eqx.filter_jit(lambda x, name: (name, [x + 1]), donate=("x",))
    report = f.donation_report(jax.ShapeDtypeStruct((3,), jnp.float32), name="n")
    (row,) = report.rows
    assert (row.outcome, row.output) == ("aliased", "output[1][0]")


def test_bytes_are_those_on_one_device_and_another_sharding_is_a_reason():
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("d",), axis_types=axis_types)
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("d",), ()))
    x = jax.device_put(jnp.ones(8), split)
    (row,) = (
        eqx.filter_jit(lambda x: {"y": x + 1}, donate="arrays", out_shardings=whole)
        .donation_report(x)
        .rows
    )
    assert row.bytes == 8 and row.outcome == "unusable"
    assert row.reason == "the sharding of output['y'] differs"
    (row,) = (
        eqx.filter_jit(lambda x: {"y": x + 1}, donate="arrays").donation_report(x).rows
    )
    assert row.outcome == "aliased"


def test_text_is_a_table():
    f = eqx.filter_jit(lambda x, y: x + y.sum(), donate="arrays")
    text = str(f.donation_report(jnp.ones(3), jnp.ones(1000)))
    lines = text.splitlines()
    assert "filter_jit of <lambda>" in lines[0]
    assert lines[1].split() == ["array", "bytes", "outcome"]
    assert lines[2].split() == ["x", "float32[3]", "12", "aliased", "with", "output"]
    assert lines[3].split()[:4] == ["y", "float32[1000]", "4,000", "unusable:"]
    assert lines[4].startswith("4,012 bytes are donated, of which outputs reuse 12.")


def test_copies_of_numpy_arrays_are_not_counted():
    f = eqx.filter_jit(lambda x, y: (x + 1, y + 1), donate="all")
    report = f.donation_report(jnp.ones(2), np.ones(3, np.float32))
    assert report.donated_bytes == report.aliased_bytes == 8
    assert [row.outcome for row in report.rows] == ["aliased", "kept"]


def test_numpy_array_has_the_dtype_in_which_it_is_passed():
    report = eqx.filter_jit(jnp.sum).donation_report(np.arange(5))
    (row,) = report.rows
    assert (row.dtype, row.bytes) == (np.int32, 20)
    assert report.memory.argument_size_in_bytes == 20


def test_arrays_of_the_callable_are_kept_and_it_says_how_to_donate_them():
    module = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    report = eqx.filter_jit(module, donate="all").donation_report(jnp.ones(2))
    weight, bias, x = report.rows
    assert x.outcome == "aliased" and weight.outcome == bias.outcome == "kept"
    assert "only arguments can be donated" in str(weight)
    assert eqx.filter_jit(module).donation_report(jnp.ones(2)).rows[0].reason is None
