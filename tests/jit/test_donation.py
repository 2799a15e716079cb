"""Donation: which buffers are reused, what is gone afterwards, and what the errors say."""

import functools
import gc
import re
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import equinox_like as eqx
from equinox_like._jit.donation import MODES

P = jax.sharding.PartitionSpec


class Model(eqx.Module):
    layers: list
    activation: Any = jax.nn.relu

    @eqx.filter_jit(donate="arrays")
    def moved(self, by):
        return Model([x + by for x in self.layers])

    @eqx.filter_jit(donate="all-except-first")
    def kept(self, x):
        return x + self.layers[0]


def pointers(tree):
    return [
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(eqx.filter(tree, is_jax))
    ]


def is_jax(x):
    return isinstance(x, jax.Array)


def double(tree):
    return jax.tree.map(lambda x: 2 * x if is_jax(x) else x, tree)


def test_outputs_take_the_buffers_of_the_donated_inputs():
    model = Model([jnp.arange(4.0), {"w": jnp.ones((2, 3))}])
    before = pointers(model)
    arrays = jax.tree.leaves(eqx.filter(model, is_jax))
    out = eqx.filter_jit(double, donate="arrays")(model)
    assert pointers(out) == before and all(x.is_deleted() for x in arrays)
    assert out.layers[0].tolist() == [0, 2, 4, 6] and out.activation is jax.nn.relu


@pytest.mark.parametrize("mode", ["arrays", "all", "warn"])
def test_every_argument_is_donated(mode):
    x, y = jnp.ones(2), jnp.ones(3)
    eqx.filter_jit(lambda x, y: (y + 1, x + 1), donate=mode)(x, y=y)
    assert x.is_deleted() and y.is_deleted()


@pytest.mark.parametrize("mode", ["all-except-first", "warn-except-first"])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_first_parameter_is_spared_however_it_is_passed(mode, by_keyword):
    first, second = jnp.ones(2), jnp.ones(3)
    f = eqx.filter_jit(lambda first, second: (second + 1, first + 1), donate=mode)
    f(second=second, first=first) if by_keyword else f(first, second)
    assert not first.is_deleted() and second.is_deleted()


def test_only_the_first_of_many_positional_arguments_is_spared():
    x, y = jnp.ones(2), jnp.ones(3)
    eqx.filter_jit(lambda *args: [a + 1 for a in args], donate="all-except-first")(x, y)
    assert not x.is_deleted() and y.is_deleted()


FIRST = {
    "keyword-only": lambda *, x, y: (x + 1, y + 1),
    "positional": lambda x, y: (x + 1, y + 1),
    "both": lambda x, *, y: (x + 1, y + 1),
    "last by name": lambda *, x, a=0.0, y: (x + 1, y + 1 + a),
    "with *args": lambda x, *args, y: (x + 1, y + 1),
    "with **kwargs": lambda *, x, **kwargs: (x + 1, kwargs["y"] + 1),
    "of a partial": functools.partial(lambda a, *, x, y: (x + a, y + a), 1.0),
}


@pytest.mark.parametrize("f", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("mode", ["all-except-first", "warn-except-first"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_first_is_first_by_the_signature(f, mode, turned, ahead):
    x, y = jnp.ones(2), jnp.ones(3)
    keywords = {"y": y, "x": x} if turned else {"x": x, "y": y}
    f = eqx.filter_jit(f, donate=mode)
    if ahead:
        f = f.lower(**keywords).compile()
    f(**keywords)
    assert not x.is_deleted() and y.is_deleted()


def test_first_of_a_mapped_function_is_first_by_the_signature_too():
    x, y = jnp.ones((4, 2)), jnp.ones((4, 3))
    f = eqx.filter_pmap(
        lambda *, x, y: (x + 1, y + 1),
        in_axes={"x": 0, "y": 0},
        donate="all-except-first",
    )
    f(y=y, x=x)
    x, y = f(y=jnp.ones((4, 3)), x=x)
    f(y=y, x=x)
    assert not x.is_deleted() and y.is_deleted()


def test_second_parameter_is_not_the_first_if_that_is_not_passed():
    for f in (
        lambda a=0.0, *, x: x + a,
        lambda *args, x: x + len(args),
        functools.partial(lambda *, a, x: x + a, a=1.0),
    ):
        x = jnp.ones(2)
        eqx.filter_jit(f, donate="all-except-first")(x=x)
        assert x.is_deleted()


def test_keywords_of_the_first_parameter_are_spared_whatever_their_order():
    x, y = jnp.ones(2), jnp.ones(3)
    f = eqx.filter_jit(
        lambda **kwargs: jax.tree.map(lambda x: x + 1, kwargs),
        donate="all-except-first",
    )
    f(y=y, x=x)
    assert not x.is_deleted() and not y.is_deleted()


def test_nothing_is_donated_by_default():
    x = jnp.ones(2)
    eqx.filter_jit(lambda x: x + 1)(x)
    assert not x.is_deleted()


def test_self_of_a_decorated_method_is_the_first_argument():
    model = Model([jnp.ones(2)])
    by = jnp.ones(2)
    assert model.kept(by).tolist() == [2, 2]
    assert by.is_deleted() and not model.layers[0].is_deleted()
    moved = model.moved(1.0)
    assert model.layers[0].is_deleted() and moved.layers[0].tolist() == [2, 2]


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.__call__])
def test_arrays_of_the_callable_itself_are_kept(wrap):
    class Add(eqx.Module):
        weight: Any

        def __call__(self, x):
            return x + self.weight

    add = Add(jnp.ones(2))
    f = eqx.filter_jit(wrap(add), donate="arrays")
    for _ in range(2):
        x = jnp.ones(2)
        assert f(x).tolist() == [2, 2] and x.is_deleted()
    assert not add.weight.is_deleted()


def test_numpy_arrays_are_never_harmed():
    x = np.ones(4, np.float32)
    out = eqx.filter_jit(lambda x: x + 1, donate="arrays")(x)
    out.block_until_ready()
    assert x.tolist() == [1, 1, 1, 1]


def test_used_key_is_gone():
    @eqx.filter_jit(donate="arrays")
    def draw(key):
        key, sub = jax.random.split(key)
        return key, jax.random.normal(sub)

    key = jax.random.key(0)
    draw(key)
    with pytest.raises(eqx.DonationError, match="`key`"):
        draw(key)


class TestUnusable:
    def f(self, a, b):
        return a["x"] + b.sum()

    def test_stays_alive_silently(self):
        a, b = {"x": jnp.ones(3)}, jnp.ones(5)
        out = eqx.filter_jit(self.f, donate="arrays")(a, b)
        assert out.tolist() == [6, 6, 6] and not b.is_deleted() and a["x"].is_deleted()

    def test_is_warned_of_by_path_once_for_each_trace(self):
        f = eqx.filter_jit(lambda a, b: self.f(a, b), donate="warn")
        for size in (5, 6):
            with pytest.warns(eqx.DonationWarning) as caught:
                f({"x": jnp.ones(3)}, jnp.ones(size))
            (warning,) = caught
            text = str(warning.message)
            assert text.startswith("Some donated buffers were not usable: ")
            assert f"`b` (float32[{size}])" in text and "`a['x']`" not in text
            assert warning.filename == __file__
            f({"x": jnp.ones(3)}, jnp.ones(size))  # an error if it warned again

    def test_is_told_apart_from_what_is_unused_or_equal_to_a_usable_one(self):
        def f(used, unused, left):
            return used + left.sum()

        with pytest.warns(
            eqx.DonationWarning, match=r"usable: `left` \(float32\[3\]\)\."
        ):
            eqx.filter_jit(f, donate="warn")(jnp.ones(3), jnp.ones(3), jnp.ones(3))

    @pytest.mark.parametrize("mode", ["arrays", "warn", "strict", ("a", "b")])
    def test_is_looked_for_on_each_device(self, mode):
        # JAX lowers for another device without a trace.
        f = eqx.filter_jit(lambda a, b: self.f(a, b), donate=mode)
        warned = []
        for device in [None] * 3 + jax.devices()[1:3] * 2:
            a, b = jax.device_put(({"x": jnp.ones(3)}, jnp.ones(5)), device)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if mode == "strict":
                    with pytest.raises(eqx.DonationError, match=r"usable: `b`"):
                        f(a, b)
                    assert not a["x"].is_deleted() and not b.is_deleted()
                else:
                    f(a, b)
                    assert a["x"].is_deleted() and b.is_deleted() == ("b" in mode)
            assert {w.category for w in caught} <= {eqx.DonationWarning}
            warned.append(len(caught))
        is_silent = mode in ("arrays", "strict")
        assert warned == ([0] * 7 if is_silent else [1, 0, 0, 1, 1, 0, 0])

    def test_typed_keys_are_warned_of_too(self):
        f = eqx.filter_jit(
            lambda key, x: (jax.random.normal(key), x + 1), donate="warn"
        )
        with pytest.warns(eqx.DonationWarning, match=r"`key` \(key<fry>\[\]\)\."):
            f(jax.random.key(0), jnp.ones(3))

    def test_sharded_and_weakly_typed_arrays_are_warned_of_too(self):
        traces = []

        def f(x, y):
            traces.append(1)
            return x.sum() + y.sum()

        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        x = jax.device_put(jnp.arange(8.0), sharding)
        y = jax.device_put(jnp.full(3, 1.0), jax.sharding.NamedSharding(mesh, P()))
        with pytest.warns(eqx.DonationWarning, match="`x`.*`y`"):
            eqx.filter_jit(f, donate="warn")(x, y)
        assert traces == [1]

    def test_warning_traces_once_only(self):
        traces = []

        def f(x):
            traces.append(1)
            return x.sum()

        with pytest.warns(eqx.DonationWarning, match="`x`"):
            eqx.filter_jit(f, donate="warn")(jnp.ones(3))
        assert traces == [1]

    def test_compiling_ahead_of_time_warns_too(self):
        f = eqx.filter_jit(self.f, donate="warn")
        lowered = f.lower({"x": jnp.ones(3)}, jnp.ones(5))
        with pytest.warns(eqx.DonationWarning, match="`b`"):
            lowered.compile()

    def test_nothing_is_warned_of_where_all_is_reused(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            eqx.filter_jit(double, donate="warn")([jnp.ones(2), jnp.ones(3)])

    def test_plain_jax_still_warns(self):
        with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
            jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(3))
        eqx.filter_jit(lambda x: x.sum(), donate="arrays")(jnp.ones(3))
        with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
            jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(4))


class TestReuse:
    def test_is_an_error_naming_the_path(self):
        model = Model([jnp.ones(2), {"w": jnp.ones(3)}])
        step = eqx.filter_jit(lambda model, x: double(model), donate="arrays")
        step(model, 1.0)
        with pytest.raises(eqx.DonationError, match=r"`model.layers\[0\]`.*and 1 more"):
            step(model, 1.0)
        with pytest.raises(
            RuntimeError, match=r"`m.layers\[1\]\['w'\]` \(float32\[3\]\)"
        ):
            eqx.filter_jit(lambda m: m.layers[1]["w"])(m=Model([0, model.layers[1]]))

    def test_is_an_error_for_a_compiled_function_and_for_the_callable_itself(self):
        x = jnp.ones(2)
        compiled = eqx.filter_jit(double, donate="arrays").lower(x).compile()
        compiled(x)
        with pytest.raises(eqx.DonationError, match="`tree`"):
            compiled(x)

        class Add(eqx.Module):
            weight: Any

            def __call__(self, x):
                return self.weight + x

        with pytest.raises(eqx.DonationError, match=r"`Add.weight`"):
            eqx.filter_jit(Add(x))(1.0)

    def test_after_the_error_the_function_still_works(self):
        f = eqx.filter_jit(double, donate="arrays")
        x = jnp.ones(2)
        f(x)
        with pytest.raises(eqx.DonationError):
            f(x)
        assert f(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("mode", ["arrays", "all-except-first"])
def test_same_buffer_twice_is_an_error_naming_both_paths_and_deletes_nothing(mode):
    x = jnp.ones(3)
    f = eqx.filter_jit(lambda a, b: (a + 1, b["w"] + 1), donate=mode)
    with pytest.raises(
        eqx.DonationError, match=r"`a` and `b\['w'\]`.*Nothing was deleted"
    ):
        f(x, {"w": x})
    assert not x.is_deleted() and x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("stage", ["trace", "lower", "eval_shape", "donation_report"])
def test_what_was_traced_ahead_of_time_is_silent_too(stage):
    f = eqx.filter_jit(lambda a, b: a + b.sum(), donate="arrays")
    a, b = jnp.ones(3), jnp.ones(5)
    getattr(f, stage)(a, b)
    f(a, b)
    assert a.is_deleted() and not b.is_deleted()


class TestStrict:
    def test_runs_where_every_buffer_is_reused(self):
        traces, events = [], []

        def f(tree):
            traces.append(1)
            return double(tree)

        x, y = jnp.ones(2), {"w": jnp.ones(3)}
        listen = lambda name, *_, **__: events.append(name.split("/")[-1])  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listen)
        f = eqx.filter_jit(f, donate="strict")
        out = f([x, y])
        assert x.is_deleted() and out[0].tolist() == [2, 2]
        f(out)
        # Looking first costs neither a trace nor a compilation more.
        assert traces == [1] and events.count("backend_compile_duration") == 1
        jax.monitoring.unregister_event_duration_listener(listen)

    @pytest.mark.parametrize(
        "stage", ["trace", "lower", "eval_shape", "donation_report"]
    )
    def test_refuses_what_was_traced_ahead_of_time(self, stage):
        f = eqx.filter_jit(lambda a, b: a + b.sum(), donate="strict")
        a, b = jnp.ones(3), jnp.ones(5)
        getattr(f, stage)(a, b)
        with pytest.raises(eqx.DonationError, match=r"strict.*`b` \(float32\[5\]\)"):
            f(a, b)
        assert not a.is_deleted() and not b.is_deleted()

    @pytest.mark.parametrize("mode", ["strict", "warn", ("x",)])
    def test_output_with_another_sharding_is_explained(self, mode):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        whole, split = (
            jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("d"))
        )

        def f(x):
            return jax.lax.with_sharding_constraint(x + 1, split)

        x = jax.device_put(jnp.arange(8.0), whole)
        step = eqx.filter_jit(f, donate=mode)
        if mode == "strict":
            with pytest.raises(eqx.DonationError, match=r"sharding.*out_shardings"):
                step(x)
        else:
            with pytest.warns(eqx.DonationWarning, match=r"sharding.*out_shardings"):
                step(x)
        x = jax.device_put(jnp.arange(8.0), whole)
        out = eqx.filter_jit(f, donate=mode, out_shardings=whole)(x)
        assert x.is_deleted() and out.sharding == whole

    @pytest.mark.parametrize("mode", ["strict", "warn"])
    def test_refused_call_does_not_run_when_it_is_repeated(self, mode):
        @eqx.filter_jit(donate=mode)
        def f(x, y):
            return (x + 1 if x.ndim == 1 else x.sum()), y + 1

        f(jnp.ones(3), jnp.ones(2))
        for _ in range(2):
            y = jnp.ones(2)
            with pytest.raises((eqx.DonationError, eqx.DonationWarning)):
                f(jnp.ones((3, 3)), y)
            assert not y.is_deleted()

    @pytest.mark.parametrize("times", [1, 2])
    def test_refuses_before_anything_runs(self, times):
        ran = []

        @eqx.filter_jit(donate="strict")
        def f(a, b):
            jax.debug.callback(lambda: ran.append(1))
            return a + b.sum()

        a, b = jnp.ones(3), {"x": jnp.ones(5)}["x"]
        for _ in range(times):
            with pytest.raises(
                eqx.DonationError, match=r"strict.*`b` \(float32\[5\]\)"
            ):
                f(a, b)
        jax.effects_barrier()
        assert not ran and not a.is_deleted() and not b.is_deleted()

    def test_refuses_what_jax_never_warns_of(self):
        f = eqx.filter_jit(lambda key, x: (jax.random.normal(key), x), donate="strict")
        key = jax.random.key(0)
        with pytest.raises(eqx.DonationError, match=r"`key` \(key<fry>"):
            f(key, jnp.ones(3))
        assert not key.is_deleted()

    def test_each_new_shape_is_looked_at(self):
        ran = []

        @eqx.filter_jit(donate="strict")
        def f(a, b):
            jax.debug.callback(lambda: ran.append(a.shape))
            return a + 1, b + a.sum()

        f(jnp.ones(3), jnp.ones(5))
        f(jnp.ones(4), jnp.ones(5))
        with pytest.raises(eqx.DonationError, match="`b`"):
            f(jnp.ones(4), jnp.ones(4, jnp.int8))
        jax.effects_barrier()
        assert ran == [(3,), (4,)]
        f(jnp.ones(3), jnp.ones(5))
        f(jnp.ones(4), np.ones(4, np.int8))  # NumPy's arrays are not given away

    def test_compiling_ahead_of_time_refuses_too(self):
        lowered = eqx.filter_jit(lambda a: a.sum(), donate="strict").lower(jnp.ones(3))
        with pytest.raises(eqx.DonationError, match="`a`"):
            lowered.compile()


class TestNames:
    def f(self, model, state, x):
        return model + x.sum(), state + 1

    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_arrays_of_the_named_parameters_are_donated(self, by_keyword):
        model, state, x = jnp.ones(2), jnp.ones(3), jnp.ones(5)
        f = eqx.filter_jit(self.f, donate=("model", "state"))
        f(x=x, state=state, model=model) if by_keyword else f(model, state, x)
        assert model.is_deleted() and state.is_deleted() and not x.is_deleted()

    def test_named_means_gone_and_is_warned_of_once(self):
        f = eqx.filter_jit(self.f, donate=("x", "model"))
        for i in range(3):
            model, state, x = jnp.ones(2), jnp.ones(3), jnp.ones(5)
            if i:
                f(model, state, x)  # an error if it warned again
            else:
                with pytest.warns(
                    eqx.DonationWarning, match=r"`x`.*are deleted anyway"
                ):
                    f(model, state, x)
            assert model.is_deleted() and x.is_deleted() and not state.is_deleted()

    def test_self_of_a_method_may_be_named(self):
        class Counter(eqx.Module):
            n: Any

            @eqx.filter_jit(donate=("self",))
            def next(self):
                return Counter(self.n + 1)

        counter = Counter(jnp.zeros(()))
        assert counter.next().n == 1 and counter.n.is_deleted()

    @pytest.mark.parametrize("decorate", [False, True])
    def test_name_that_is_no_parameter_is_refused_at_decoration(self, decorate):
        def train(model, x):
            return model

        with pytest.raises(ValueError, match=r"'opt'.*`train`.*'model', 'x'"):
            if decorate:
                eqx.filter_jit(donate=("model", "opt"))(train)
            else:
                eqx.filter_jit(train, donate=("model", "opt"))

    def test_no_names_donate_nothing(self):
        x = jnp.ones(2)
        eqx.filter_jit(double, donate=())(x)
        assert not x.is_deleted()


class TestAfterACall:
    @pytest.mark.parametrize("donate", [*MODES, ("tree",)])
    @pytest.mark.parametrize("ahead", [False, True])
    def test_array_that_numpy_holds_stays_alive_as_with_jax(self, donate, ahead):
        f = eqx.filter_jit(double, donate=donate)
        if ahead:
            f = f.lower(jnp.arange(1024.0)).compile()
        for _ in range(3):
            x = jnp.arange(1024.0)
            view = np.asarray(x)
            out = f(x)
            assert not x.is_deleted() and out[1] == 2 and view[1] == x[1] == 1

    @pytest.mark.filterwarnings("ignore::equinox_like.DonationWarning")
    @pytest.mark.parametrize("used", [False, True])
    def test_named_array_that_nothing_can_take_stays_alive_if_numpy_holds_it(
        self, used
    ):
        f = eqx.filter_jit(lambda x: x.sum() if used else 0, donate=("x",))
        for is_held in [False, True, True, False]:
            x = jnp.arange(1024.0)
            view = np.asarray(x) if is_held else None
            f(x)
            assert x.is_deleted() != is_held
            assert view is None or view[1] == x[1] == 1

    @pytest.mark.parametrize("donate", MODES)
    def test_no_mode_calls_delete(self, donate, monkeypatch):
        monkeypatch.setattr(type(jnp.ones(3)), "delete", None)
        f, x = eqx.filter_jit(double, donate=donate), jnp.ones(3)
        f(x)
        f(jnp.ones(4))
        assert x.is_deleted() == (not donate.endswith("first") and donate != "none")

    @pytest.mark.parametrize("spec", [P("d"), P()])
    def test_sharded_array_of_which_numpy_holds_a_part_is_an_error(self, spec):
        # JAX deletes the other parts only, and a later use may end the process.
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        f = eqx.filter_jit(double, donate="arrays")
        g = eqx.filter_jit(lambda x: x + 1)
        for part in range(4):
            x = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(mesh, spec))
            g(x)
            view = np.asarray(x.addressable_shards[part].data)
            f(x)
            assert view[1] == 1 and "deleted" in eqx.tree_pformat(x)
            with pytest.raises(eqx.DonationError, match=r"`x`.*donated to"):
                g(x)

    def test_replicated_array_with_a_view_of_a_shard_is_gone(self):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        f = eqx.filter_jit(double, donate="arrays")
        for _ in range(2):
            x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, P()))
            view = np.asarray(x.addressable_shards[1].data)
            f(x)
            assert x.is_deleted() and view[1] == 1
            with pytest.raises(eqx.DonationError, match="`tree`"):
                f(x)

    @pytest.mark.parametrize("donate", ["arrays", "warn", "strict", ("tree",)])
    @pytest.mark.parametrize("takes_it_first", [True, False])
    def test_sharded_array_passed_again_is_an_error(self, donate, takes_it_first):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, P("d"))
        x = jax.device_put(jnp.arange(8.0), sharding)
        f = eqx.filter_jit(double, donate=donate)
        if takes_it_first:
            f(x)
        else:  # then it knows arrays on one device only
            f(jnp.arange(8.0))
            x.delete()
        for _ in range(2):
            with pytest.raises(eqx.DonationError, match="`tree`"):
                f(x)

    @pytest.mark.parametrize("spec", [P("d"), P()])
    @pytest.mark.parametrize("ahead", [False, True])
    def test_sharded_array_passed_to_what_donates_nothing_is_an_error(
        self, spec, ahead
    ):
        # With what JAX alone has deleted, jax 0.10 would end the process.
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        x, y = (jax.device_put(jnp.arange(8.0), sharding) for _ in range(2))
        g = eqx.filter_jit(lambda tree: tree + 1)
        g(x)
        f = eqx.filter_jit(double, donate="arrays")
        (f.lower(x).compile() if ahead else f)(x)
        f(y)
        for gone in (x, y):
            with pytest.raises(eqx.DonationError, match="`tree`"):
                g(gone)

    @pytest.mark.parametrize("first", ["alive", "taken"])
    def test_viewed_array_stays_alive_whatever_calls_there_were(self, first):
        f = eqx.filter_jit(lambda x, y: (x + 1, y[:2] * 2), donate="arrays")
        sizes = [3, 2] if first == "alive" else [2, 3]
        for size in [*sizes * 2, *sizes[:1] * 3, *sizes[1:] * 3]:
            x, y = jnp.ones(3), jnp.ones(size)
            view = np.asarray(y)
            f(x, y)
            assert x.is_deleted() and not y.is_deleted()
            assert view.tolist() == y.tolist() == [1] * size
            del view
            y = jnp.ones(size)
            f(jnp.ones(3), y)
            assert y.is_deleted() == (size == 2)

    def test_array_that_nothing_can_take_stays_alive_beside_a_viewed_one(self):
        f = eqx.filter_jit(lambda a, b: a + b.sum(), donate="arrays")
        for size in (5, 5, 6, 5):
            a, b = jnp.arange(1024.0), jnp.ones(size)
            view = np.asarray(a)
            f(a, b)
            assert not a.is_deleted() and not b.is_deleted() and view[1] == 1

    def test_viewed_array_behind_one_that_is_kept_stays_alive(self):
        @eqx.filter_jit(donate="all-except-first")
        def f(a, b, c):
            return b + a.sum() + c.sum()

        a, b, c = arrays = jnp.ones(4), jnp.ones(3), jnp.ones(2)
        views = [np.asarray(x) for x in arrays]
        f(a, b, c)
        assert [x.is_deleted() for x in arrays] == [False, False, False]
        del views
        f(a, b, c)
        assert [x.is_deleted() for x in arrays] == [False, True, False]

    @pytest.mark.parametrize("ahead", [False, True])
    def test_batch_that_nothing_can_take_stays_alive_in_each_call(self, ahead):
        def step(params, batch, labels, key):
            return jax.tree.map(lambda p: p + batch.sum() + labels.sum(), params)

        f = eqx.filter_jit(step, donate="arrays")
        key, labels = jax.random.key(0), np.ones(3, np.float32)
        params = {"a": jnp.ones(4), "b": jnp.ones(2)}
        if ahead:
            f = f.lower(params, jnp.ones(5), labels, key).compile()
        for viewed in [False, False, True, True, False]:
            params = jax.tree.map(jnp.copy, params)
            view = np.asarray(params["b"]) if viewed else None
            batch, old = jnp.ones(5), params
            params = f(params, batch, labels, key)
            assert old["a"].is_deleted() and old["b"].is_deleted() != viewed
            assert not batch.is_deleted() and not key.is_deleted()
            del view
        assert labels.tolist() == [1, 1, 1] and params["a"][0] == 41

    def test_message_names_the_function_that_took_it(self):
        @eqx.filter_jit(donate="arrays")
        def update(x):
            return x + 1

        x = jnp.ones(2)
        update(x)
        for f in (update, eqx.filter_jit(double)):
            with pytest.raises(eqx.DonationError, match=r"donated to `\S*update`"):
                f(x)

    def test_records_keep_no_memory(self):
        @eqx.filter_jit(donate="arrays")
        def update(x, y):
            return x + y.sum()

        x, y = jnp.ones(2), jnp.ones(1000)
        update(x, y)
        before = weakref.ref(y)
        del y
        gc.collect()
        assert before() is None

    def test_failing_computation_says_what_is_lost(self):
        def fail(x):
            raise KeyError("no")

        @eqx.filter_jit(donate="arrays")
        def f(x):
            shape = jax.ShapeDtypeStruct((3,), "float32")
            return jax.pure_callback(fail, shape, x)

        @eqx.filter_jit(donate="arrays")
        def g(x):
            raise KeyError("no")

        x = jnp.ones(3)
        with pytest.raises(KeyError) as caught:
            g(x)
        assert "No donated array is lost." in caught.value.__notes__
        assert not x.is_deleted()
        with pytest.raises(Exception, match="no"):
            jax.block_until_ready(f(x))

    def test_without_jit_nothing_is_donated(self):
        x = jnp.ones(3)
        for donate in ("arrays", "strict", ("x",)):
            with jax.disable_jit():
                eqx.filter_jit(lambda x: x.sum(), donate=donate)(x)
            assert not x.is_deleted()


class TestUnderTransformations:
    @pytest.mark.parametrize(
        "transform",
        [
            lambda f, x: jax.vmap(f)(x),
            lambda f, x: jax.grad(lambda x: f(x).sum())(x),
            lambda f, x: jax.vjp(f, x)[1](x),
            lambda f, x: jax.jvp(f, (x,), (x,)),
            lambda f, x: jax.linearize(f, x)[1](x),
            lambda f, x: jax.checkpoint(f)(x),
            lambda f, x: jax.jit(f)(x),
            lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2),
            lambda f, x: eqx.filter_jit(lambda x: f(x))(x),
            lambda f, x: eqx.filter_grad(lambda x: f(x).sum())(x),
            lambda f, x: eqx.filter_vmap(f)(x),
        ],
    )
    def test_nothing_is_donated(self, transform):
        x = jnp.ones(3)
        f = eqx.filter_jit(lambda x: x * jnp.sin(x), donate="arrays")
        transform(f, x)
        assert not x.is_deleted()

    def test_nothing_that_is_closed_over_is_donated_either(self):
        x = jnp.ones(3)
        f = eqx.filter_jit(lambda x: 2 * x, donate="arrays")
        jax.grad(lambda w: (w * f(x)).sum())(1.0)
        assert not x.is_deleted()
        f(x)
        assert x.is_deleted()


class TestMemory:
    """XLA's own account of a train step, against plain JAX."""

    def setup_method(self):
        self.optimiser = optax.adam(1e-3)
        shapes = [(16, 8), (16,), (4, 16)]
        self.params = {f"p{i}": jnp.ones(s) for i, s in enumerate(shapes)}
        self.state = self.optimiser.init(self.params)
        self.x = jnp.ones((5, 8))

    def step(self, params, state, x):
        def loss(p):
            return jnp.mean((jnp.tanh(x @ p["p0"].T + p["p1"]) @ p["p2"].T) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = self.optimiser.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    @staticmethod
    def account(compiled):
        found = compiled.memory_analysis()
        return (
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )

    @pytest.mark.parametrize("mode", ["none", "arrays"])
    def test_step_takes_the_bytes_of_plain_jit(self, mode):
        args = self.params, self.state, self.x
        donated = (0, 1, 2) if mode == "arrays" else ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = jax.jit(self.step, donate_argnums=donated).lower(*args).compile()
        ours = eqx.filter_jit(self.step, donate=mode).lower(*args).compile()
        assert self.account(ours) == self.account(plain)
        aliased = self.account(ours)[2]
        assert (aliased > 0) == (mode == "arrays")

    def test_loop_keeps_one_set_of_buffers(self):
        step = eqx.filter_jit(self.step, donate="arrays")
        params, state = self.params, self.state
        before = set(pointers((params, state)))
        for _ in range(5):
            params, state, _ = step(params, state, jnp.ones((5, 8)))
        assert set(pointers((params, state))) == before
        gc.collect()


@pytest.mark.parametrize("bad", ["some", "", None, True, "none ", ("a", 1)], ids=repr)
def test_unknown_mode_is_refused_with_the_choices(bad):
    with pytest.raises(ValueError) as caught:
        eqx.filter_jit(double, donate=bad)
    assert all(f'"{mode}"' in str(caught.value) for mode in MODES)
    assert repr(bad) in str(caught.value)


def test_sharded_arrays_are_donated_too():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.device_put(jnp.arange(8.0), sharding)
    before = [s.data.unsafe_buffer_pointer() for s in x.addressable_shards]
    out = eqx.filter_jit(double, donate="arrays")(x)
    assert [s.data.unsafe_buffer_pointer() for s in out.addressable_shards] == before
    assert x.is_deleted() and out.sharding == sharding


UNUSED_MODES = ["arrays", "all-except-first", "warn", "strict", ("x",), ("y",)]


@pytest.mark.filterwarnings("ignore::equinox_like.DonationWarning")
@pytest.mark.parametrize("mode", UNUSED_MODES)
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
class TestPlaceThatIsNotUsed:
    """JAX does not look at its array, which may be deleted, or donated elsewhere."""

    def call(self, mode, warm, ahead):
        f = eqx.filter_jit(lambda y, x: x + 1, donate=mode)
        if ahead:
            f = f.lower(jnp.ones(3), jnp.ones(3)).compile()
        if warm:
            f(jnp.ones(3), jnp.ones(3))
        return f

    def test_same_array_in_a_used_place_is_an_error(self, mode, warm, ahead):
        f, x = self.call(mode, warm, ahead), jnp.ones(3)
        with pytest.raises(eqx.DonationError, match="`y` and `x` are the same array"):
            f(x, x)
        assert not x.is_deleted() and f(jnp.ones(3), x).tolist() == [2, 2, 2]

    def test_deleted_array_is_an_error(self, mode, warm, ahead):
        f, gone = self.call(mode, warm, ahead), jnp.ones(3)
        eqx.filter_jit(lambda x: x + 1, donate="arrays")(gone)
        with pytest.raises(eqx.DonationError, match=r"`y` .*has been deleted"):
            f(gone, jnp.ones(3))


def test_error_ends_with_what_to_use_and_how_to_keep_the_old_one():
    @eqx.filter_jit(donate="arrays")
    def step(model):
        return {name: x + 1 for name, x in model.items()}

    model = {"weight": jnp.ones(3)}
    step(model)
    with pytest.raises(eqx.DonationError) as caught:
        step(model)
    assert str(caught.value) == (
        "`model['weight']` (float32[3]) has been deleted: it was donated to `step`. Use "
        "the `model` that `step` returned. To keep the old one, pass "
        "`eqx.tree_copy(model)`."
    )


def test_named_array_that_is_not_used_is_warned_of_and_deleted():
    f, x = eqx.filter_jit(lambda x, y: y + 1, donate=("x",)), jnp.ones(3)
    with pytest.warns(
        eqx.DonationWarning, match=r"`x` .*does not use them.*are deleted anyway"
    ):
        f(x, jnp.ones(3))
    assert x.is_deleted()


def test_key_that_no_output_can_take_is_deleted_only_by_name():
    def draw(key):
        return jax.random.uniform(key)

    kept, gone = jax.random.key(0), jax.random.key(0)
    eqx.filter_jit(draw, donate="arrays")(kept)
    with pytest.warns(eqx.DonationWarning, match="`key`"):
        eqx.filter_jit(draw, donate=("key",))(gone)
    assert not kept.is_deleted() and gone.is_deleted()


def test_interrupted_trace_leaves_no_warning_muted():
    def interrupted(x):
        raise KeyboardInterrupt

    filters = list(warnings.filters)
    with pytest.raises(KeyboardInterrupt):
        eqx.filter_jit(interrupted, donate="arrays")(jnp.ones(2))
    assert warnings.filters == filters


@pytest.mark.parametrize("donate", ["arrays", "none"])
def test_interrupted_call_says_what_is_lost(donate, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    @eqx.filter_jit(donate=donate)
    def step(model, x):
        return eqx.error_if(model, model["w"][0] < 0, "no"), x.sum()  # the call waits

    model = step({"w": jnp.ones(3)}, jnp.ones(2))[0]
    monkeypatch.setattr(jax, "block_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        step(model, jnp.ones(2))
    if donate == "none":
        assert not hasattr(caught.value, "__notes__")
    else:
        assert caught.value.__notes__ == ["Donated arrays are lost: `model['w']`."]


def test_failing_call_within_a_trace_does_not_end_the_muting_of_the_outer_one():
    @eqx.filter_jit
    def failing(x):
        raise KeyError

    @eqx.filter_jit(donate="arrays")
    def outer(x):
        with pytest.raises(KeyError):
            failing(x)
        return x.sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        outer(jnp.ones((4, 4)))
    assert not [w for w in caught if "donated" in str(w.message)]


@pytest.mark.parametrize("donate", ["arrays", "warn", ("x",)])
def test_filters_that_another_thread_sets_do_not_fail_a_call(donate):
    @eqx.filter_jit(donate=donate)
    def f(x):
        # As another thread may, while this one traces.
        warnings.filterwarnings(
            "error", "Some donated buffers were not usable: float32"
        )
        return x.sum()

    silent = donate == "arrays"
    with nullcontext() if silent else pytest.warns(eqx.DonationWarning):
        assert f(jnp.ones((3, 5))) == 15


class TestWhatDeletedAnArray:
    def update(self, **options):
        return eqx.filter_jit(lambda x: x + 1, donate="arrays", **options)

    def refusal(self, x):
        with pytest.raises(eqx.DonationError, match="`x`") as caught:
            self.update()(x)
        return str(caught.value)

    def test_a_function_is_named(self):
        x, update = jnp.ones(3), self.update()
        update(x)
        assert "it was donated to `" in self.refusal(x)

    def test_a_function_that_was_called_again_since_is_named(self):
        x, update = jnp.ones(3), self.update()
        new = update(x)
        for _ in range(5):
            new = update(new)
        assert "it was donated to `" in self.refusal(x)

    def test_a_function_that_copied_it_for_numpy_has_not(self):
        x = jnp.ones(1024)
        view, update = np.asarray(x), self.update()
        assert update(x)[0] == update(x)[0] == 2 and view[0] == x[0] == 1
        other = self.update()
        del view
        other(x)
        assert "it was donated to `" in self.refusal(x)

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_function_that_failed_since_is_named(self, ahead):
        @eqx.filter_jit(donate="arrays")
        def step(x, y):
            return eqx.error_if(x + 1, y > 0, "too large")

        x, run = jnp.ones(3), step
        if ahead:
            run = step.lower(x, jnp.array(1)).compile()
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large") as caught:
            run(x, jnp.array(1))
        assert "Donated arrays are lost: `x`." in caught.value.__notes__
        for _ in range(2):  # the refused call is not noted
            assert "it was donated to `" in self.refusal(x)
            with pytest.raises(eqx.DonationError, match=r"donated to `\S*step`"):
                self.update()(x)

    def test_a_jitted_function_of_jax_is_an_earlier_call(self):
        x = jnp.ones(3)
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        assert "it was donated to an earlier call." in self.refusal(x)

    def test_it_is_found_for_each_argument(self):
        def step(model, opt_state, batch):
            return jax.tree.map(lambda x: x + batch.sum(), (model, opt_state))

        step = eqx.filter_jit(step, donate="arrays")
        model, opt_state = [jnp.ones(2), jnp.ones(3)], {"mu": jnp.ones(4)}
        new_model, new_opt_state = step(model, opt_state, jnp.ones(5))
        took_it = r"`{}` .* been deleted: .* was donated to `\S*step`"
        for stale, path in [
            ((model, new_opt_state), "model[0]"),
            ((new_model, opt_state), "opt_state['mu']"),
        ]:
            with pytest.raises(
                eqx.DonationError, match=took_it.format(re.escape(path))
            ):
                step(*stale, jnp.ones(5))

    def test_the_array_shown_is_one_of_which_it_is_known(self):
        x, y, update = jnp.ones(3), jnp.ones(2), self.update()
        jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        update(y)
        f = eqx.filter_jit(lambda x, y: (x, y))
        with pytest.raises(eqx.DonationError) as caught:
            f(x, y)
        assert re.match(
            r"`y` \(float32\[2\]\) and 1 more array have been deleted: "
            r"`y` was donated to `",
            str(caught.value),
        )

    def test_its_own_method_may_have(self):
        x = jnp.ones(3)
        x.delete()
        assert "or its `delete` method was called" in self.refusal(x)


class TestDebugNans:
    """JAX donates nothing in what is compiled under `jax_debug_nans`."""

    @pytest.mark.parametrize("mode", [*MODES, ("x",)])
    def test_no_array_counts_as_unusable(self, mode):
        with jax.debug_nans(True):
            f = eqx.filter_jit(lambda x: x + 1, donate=mode)
            assert (f(jnp.ones(4)) == 2).all()
            (row,) = f.donation_report(jnp.ones(4)).rows
        assert (row.outcome, row.output) == ("kept", None)
        if mode not in ("none", "all-except-first", "warn-except-first"):
            assert "`jax_debug_nans`" in row.reason

    def test_nan_in_a_donating_call_is_no_deleted_array(self):
        f, x = eqx.filter_jit(jnp.log, donate="all"), -jnp.ones(3)
        f(jnp.ones(3))
        with jax.debug_nans(True):
            with pytest.raises(
                FloatingPointError, match=r"NaN .*`\.clear_cache\(\)`"
            ) as e:
                f(x)
            f.clear_cache()
            with pytest.raises(FloatingPointError, match=r"nan.* encountered in log"):
                f(x := -jnp.ones(3))
        assert not x.is_deleted() and "donated and deleted" in str(e.value)


@pytest.mark.parametrize("donate", [("x",), "arrays"])
def test_call_with_static_arguments_that_fails_keeps_its_error(donate):
    @eqx.filter_jit(donate=donate)
    def f(x, name):
        raise KeyError(name)

    x = jnp.ones(3)
    with pytest.raises(KeyError, match="wrong") as caught:
        f(x, "wrong")
    assert caught.value.__notes__[-1] == "No donated array is lost."
    assert not x.is_deleted()
