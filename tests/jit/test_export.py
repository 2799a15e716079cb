"""filter_export: what comes back in another process, and what is refused there."""

import collections
import dataclasses
import enum
import json
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from strategies import Config, OfAttrs

import equinox_like as eqx
from equinox_like._core.describe import (
    describe,
    first_difference,
    stored,
)

FLOAT = jax.ShapeDtypeStruct((3,), jnp.float32)
Pair = collections.namedtuple("Pair", ["left", "right"])


class Colour(enum.Enum):
    RED = 1


class Rate(eqx.Module):
    value: float = eqx.field(static=True)


class Model(eqx.Module):
    weight: Any
    activation: Any = jnp.tanh
    size: Any = eqx.field(static=True, default=3)

    def __call__(self, x):
        return self.activation(self.weight * x)

    def half(self, x):
        return self(x) / 2

    def third(self, x):
        return self(x) / 3

    @eqx.filter_jit
    def jitted(self, x, by=1):
        return self(x) * by


def model(**kwargs):
    return Model(jnp.full(3, 2.0), **kwargs)


def step(model, x, mode="train", *, options=(1, 2.0)):
    return {"loss": model(x).sum(), "mode": mode}, [None, (options, x)]


def top_level(x):
    return x + 1


def loaded(exported, like=None):
    return eqx.deserialize_export(exported.serialize(), like)


def test_exported_function_agrees_with_the_function_before_and_after_loading():
    exported = eqx.filter_export(step)(model(), FLOAT, options=(3, 4.0))
    expected, _ = step(model(), jnp.ones(3), options=(3, 4.0))
    for f in (exported, loaded(exported)):
        for call in (f, f.call, eqx.filter_jit(f), f):
            out, (nothing, (options, x)) = call(model(), jnp.ones(3), options=(3, 4.0))
            assert jnp.allclose(out["loss"], expected["loss"])
            assert out["mode"] == "train" and nothing is None and x.tolist() == [1] * 3
            assert options == (3, 4.0) and type(options[1]) is float


def test_arrays_of_the_callable_are_part_of_the_program():
    exported = eqx.filter_export(model())(FLOAT)
    assert len(exported.exported.in_avals) == len(exported.exported.out_avals) == 1
    assert jnp.allclose(loaded(exported)(jnp.ones(3)), model()(jnp.ones(3)))


@pytest.mark.parametrize(
    "fun",
    [model().__call__, eqx.filter_jit(model()), eqx.filter_jit(donate="all")(model())],
    ids=["method", "filter_jit", "donating"],
)
def test_any_callable_can_be_exported(fun):
    x, filters = jnp.ones(3), list(warnings.filters)
    f = loaded(eqx.filter_export(fun)(FLOAT))
    assert jnp.allclose(f(x), model()(x)) and not x.is_deleted()
    assert warnings.filters == filters


@pytest.mark.parametrize("donate", ["none", "all"])
@pytest.mark.parametrize("kind", ["shard_map", "pmap"])
def test_function_of_each_device_is_exported_as_one(kind, donate):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    if kind == "pmap":
        f = eqx.filter_pmap(jnp.cumsum, axis_name="i", donate=donate)
        x, expected = jnp.ones((4, 2)), [[1, 2]] * 4
    else:
        f = eqx.filter_shard_map(
            jnp.cumsum, mesh=mesh, in_specs=P("i"), out_specs=P("i"), donate=donate
        )
        x, expected = jnp.ones(8), [1, 2] * 4
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("i")))
    exported = eqx.filter_export(f)(x)
    assert exported.exported.nr_devices == 4 and "cumsum" in repr(exported)
    assert exported(x).tolist() == loaded(exported)(x).tolist() == expected
    assert not x.is_deleted()


def test_deleted_argument_is_named():
    f = loaded(eqx.filter_export(step)(model(), FLOAT))
    deleted = model()
    deleted.weight.delete()
    with pytest.raises(eqx.DonationError, match=r"`model\.weight` .* deleted"):
        f(deleted, jnp.ones(3))


def test_order_of_a_static_dictionary_does_not_count():
    table, reordered = {"a": 1, 2: "b"}, {2: "b", "a": 1}
    f = loaded(eqx.filter_export(Model.half)(model(size=table), FLOAT))
    x = jnp.ones(3)
    assert jnp.allclose(f(model(size=reordered), x), model().half(x))
    with pytest.raises(TypeError, match=r"`self\.size` was the static value dict\("):
        f(model(size={2: "b", "a": 1.0}), x)


def test_methods_are_exported_through_their_class():
    f = loaded(eqx.filter_export(Model.jitted)(model(), FLOAT, by=2))
    assert jnp.allclose(f(model(), jnp.ones(3), by=2), 2 * model()(jnp.ones(3)))


def test_bound_methods_are_arguments_and_outputs():
    exported = eqx.filter_export(eqx.filter_jit(lambda fun, x: fun(x)))
    f = loaded(exported(model().half, FLOAT))
    x = jnp.ones(3)
    assert jnp.allclose(f(model().half, x), model().half(x))
    with pytest.raises(TypeError, match=r"`fun\.__func__`"):
        f(model().third, x)
    method = eqx.filter_export(lambda model: model.half)(model())
    assert jnp.allclose(method(model())(x), model().half(x))
    assert jnp.allclose(loaded(method, model().half)(model())(x), model().half(x))


def test_arguments_go_by_position_or_name():
    f = loaded(eqx.filter_export(lambda b, a: b - a)(FLOAT, FLOAT))
    x, y = jnp.full(3, 3.0), jnp.ones(3)
    for out in (f(x, y), f(a=y, b=x), f(x, a=y)):
        assert out.tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        f(x)


class TestRefusals:
    @pytest.mark.parametrize(
        "platforms", [("cpu",), ("cuda",), ("tpu",), ("cpu", "tpu")], ids=str
    )
    def test_program_that_calls_python_is_refused(self, platforms):
        def checked(x):
            return eqx.error_if(x, x < 0, "negative")

        def callback(x):
            return eqx.filter_pure_callback(abs, x, result_shape_dtypes=x)

        for f in (checked, callback):
            with pytest.raises(NotImplementedError, match=f"`{f.__name__}` calls Pyth"):
                eqx.filter_export(f, platforms=platforms)(jnp.ones(3))

    def test_cudnn_is_exported_only_without_the_check(self):
        call = jax.ffi.ffi_call("__cudnn$test", jax.ShapeDtypeStruct((3,), jnp.float32))
        with pytest.raises(
            ValueError, match=r"calls cuDNN.*for name in \['__cudnn\$te"
        ):
            eqx.filter_export(call)(jnp.ones(3))
        check = jax.export.DisabledSafetyCheck.custom_call("__cudnn$test")
        exported = eqx.filter_export(call, disabled_checks=[check])(jnp.ones(3))
        assert "__cudnn$test" in exported.exported.mlir_module()

    @pytest.mark.parametrize("load", [False, True], ids=["exported", "loaded"])
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"mode": "test"}, "`mode` was left out, and is now given"),
            (
                {"options": (1, 2)},
                r"`options\[1\]` was the static value 2.0, and .* 2\.",
            ),
            (
                {"options": (True, 2.0)},
                r"`options\[0\]` was the static value 1, .* True",
            ),
            ({"options": None}, r"`options` was a tuple of length 2, and is now None"),
            ({"options": [1, 2.0]}, "`options` was a tuple .* a list of length 2"),
            ({"model": model(size=4)}, "`model.size` was the static value 3, .* 4"),
            ({"model": model(activation=jnp.cos)}, "`model.activation` .*tanh.*cos"),
            ({"model": model(activation=lambda x: x)}, "`model.activation` .*lambda"),
            (
                {"model": 2.0},
                r"`model` was a .*:Model, and is now the static value 2.0",
            ),
            ({"x": 2.0}, "`x` was an array, and is now the static value 2.0"),
            ({"x": {"a": jnp.ones(3)}}, r"`x` was an array, .* with the keys \['a'\]"),
        ],
        ids=str.split("argument bool_ type None list field leaf lambda node x dict"),
    )
    def test_other_statics_and_structures_are_named(self, change, message, load):
        f = eqx.filter_export(step)(model(), FLOAT, options=(1, 2.0))
        f = loaded(f) if load else f
        arguments = {"model": model(), "x": jnp.ones(3), "options": (1, 2.0)}
        with pytest.raises(TypeError, match=message):
            f(**arguments | change)
        f(**arguments)

    def test_other_shapes_and_dtypes_are_named(self):
        f = loaded(eqx.filter_export(step)(model(), FLOAT))
        with pytest.raises(ValueError, match=r"mismatch for `model\.weight`.*\(4,\)"):
            f(Model(jnp.ones(4)), jnp.ones(3))
        with pytest.raises(ValueError, match=r"mismatch for `x`.*int32"):
            f(model(), jnp.arange(3))

    def test_other_platform_is_refused(self):
        f = loaded(eqx.filter_export(top_level, platforms=("tpu", "cuda"))(FLOAT))
        assert f.platforms == ("tpu", "cuda") and "tpu, cuda" in repr(f)
        with pytest.raises(ValueError, match=r"exported for platforms.*tpu.*cpu"):
            f(jnp.ones(3))

    @pytest.mark.parametrize(
        ("value", "path"),
        [(lambda x: x, "model.activation"), (object(), "model.activation")],
        ids=["lambda", "object"],
    )
    def test_what_cannot_be_described_works_here_and_is_not_serialised(
        self, value, path
    ):
        m = Model(jnp.ones(3), activation=value)
        f = eqx.filter_export(lambda model, x: model.weight * x)(m, FLOAT)
        assert f(m, jnp.ones(3)).tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=f"`{path}` was the static"):
            f(Model(jnp.ones(3), activation=object()), jnp.ones(3))
        with pytest.raises(ValueError, match=f"`{path}` is the static"):
            f.serialize()

    def test_parts_of_an_index_are_described(self):
        def take(model, x, axis=...):
            return {"part": x[model.size], "size": model.size, "rest": (axis, range(3))}

        for index in (slice(1, 3), ..., (slice(None, None, 2), ...), (..., slice(2))):
            m = Model(1, size=index)
            f = loaded(eqx.filter_export(take)(m, FLOAT))
            out = f(m, jnp.arange(3.0))
            assert out["part"].tolist() == jnp.arange(3.0)[index].tolist()
            assert out["size"] == index and out["rest"] == (..., range(3))
            for other in (slice(1, 2), slice(1.0, 3), slice(True, 3), (...,), None):
                with pytest.raises(
                    TypeError, match=r"`model\.size` was the static value"
                ):
                    f(Model(1, size=other), jnp.arange(3.0))

    def test_signed_zeros_differ_and_nans_do_not(self):
        f = loaded(eqx.filter_export(lambda x, k: x * k)(FLOAT, 0.0))
        f(jnp.ones(3), 0.0)
        with pytest.raises(TypeError, match=r"`k` was the static value 0.0, .* -0.0"):
            f(jnp.ones(3), -0.0)
        f = loaded(eqx.filter_export(lambda x, k: x * k)(FLOAT, float("nan")))
        f(jnp.ones(3), float("nan"))


class TestOutputs:
    def test_modules_come_back_by_a_tree_like_them(self):
        f = eqx.filter_jit(lambda m, x: (m, Pair(x, "n")))
        data = eqx.filter_export(f)(model(), FLOAT).serialize()
        with pytest.raises(ValueError, match=r"`out\[0\]` is a .*Model, .* `like`"):
            eqx.deserialize_export(data)
        like = f.eval_shape(model(), FLOAT)
        m, pair = eqx.deserialize_export(data, like)(model(), jnp.ones(3))
        assert isinstance(m, Model) and m.activation is jnp.tanh and m.size == 3
        assert isinstance(pair, Pair) and pair.right == "n" and pair.left.shape == (3,)

    def test_tree_that_is_not_like_the_output_is_refused(self):
        f = eqx.filter_export(lambda m: (m, 1))(model())
        for like, message in (
            ((model(size=4), 1), r"`out\[0\].size` was the static value 3, .* 4"),
            ((model(), True), r"`out\[1\]` was the static value 1, .* True"),
            ((model(), 1, 2), "`out` was a tuple of length 2, .* 3"),
        ):
            with pytest.raises(ValueError, match=message):
                loaded(f, like)

    def test_plain_values_come_back_with_their_types(self):
        values = [1, 1.0, True, None, "text", b"\x00", 1j, -0.0, (1, frozenset({2}))]
        out = loaded(
            eqx.filter_export(lambda x: {"x": x, "v": values, "e": ()})(FLOAT)
        )(jnp.ones(3))
        assert out["v"] == values and out["e"] == ()
        assert list(map(type, out["v"])) == list(map(type, values))
        assert str(out["v"][7]) == "-0.0"

    def test_nodes_without_children_are_containers(self):
        empty = {"a": [], "b": {}, "c": [(), {}]}
        f = loaded(eqx.filter_export(lambda tree, x: (tree, x))(empty, FLOAT))
        assert f(empty, jnp.ones(3))[0] == empty
        message = r"`tree\['b'\]` was an empty dict, and is now an empty list"
        with pytest.raises(TypeError, match=message):
            f(empty | {"b": []}, jnp.ones(3))

    @pytest.mark.parametrize(
        "node",
        [collections.OrderedDict(), collections.defaultdict(list), Rate(0.5)],
        ids=["ordered", "default", "module"],
    )
    def test_nodes_without_children_are_arguments(self, node):
        f = loaded(eqx.filter_export(lambda node, x: x)(node, FLOAT))
        assert f(node, jnp.ones(3)).tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=r"`node` was an? .*, and is now None"):
            f(None, jnp.ones(3))

    def test_function_as_an_output_is_not_looked_up_by_name(self):
        f = eqx.filter_export(lambda x: (x, top_level))(FLOAT)
        with pytest.raises(ValueError, match=r"`out\[1\]` is the static .*top_level"):
            loaded(f)
        assert loaded(f, (FLOAT, top_level))(jnp.ones(3))[1] is top_level

    def test_no_arrays_at_all(self):
        assert loaded(eqx.filter_export(lambda: 3)())() == 3


class TestJax:
    def test_dimensions_may_be_symbolic(self):
        (n,) = jax.export.symbolic_shape("n")
        x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
        f = loaded(eqx.filter_export(jax.vmap(model()))(x))
        for size in (1, 5):
            assert f(jnp.ones((size, 3))).shape == (size, 3)
        with pytest.raises(ValueError, match="`x`"):
            f(jnp.ones((2, 4)))

    def test_dimension_that_is_returned_is_a_number(self):
        (n,) = jax.export.symbolic_shape("n")
        x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
        f = loaded(eqx.filter_export(lambda x: (x.shape, x.size // 2))(x))
        assert eqx.tree_equal(
            f(jnp.ones((4, 3))), ((jnp.asarray(4), 3), jnp.asarray(6))
        )

    def test_typed_keys_numpy_arrays_and_jit_work(self):
        f = loaded(eqx.filter_export(jax.random.normal)(jax.random.key(0), (2,)))
        key = jax.random.key(1)
        expected = jax.random.normal(key, (2,))
        assert jnp.array_equal(f(key, (2,)), expected)
        assert jnp.array_equal(jax.jit(lambda k: f(k, (2,)))(key), expected)
        g = loaded(eqx.filter_export(top_level)(FLOAT))
        assert g(np.ones(3, np.float32)).tolist() == [2, 2, 2]

    def test_derivatives_are_kept_if_asked_for(self):
        exported = eqx.filter_export(lambda x: (x**3).sum())(FLOAT)
        f = eqx.deserialize_export(exported.serialize(vjp_order=1))
        assert jax.grad(f)(jnp.ones(3)).tolist() == [3, 3, 3]

    def test_shardings_are_part_of_the_program(self):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        split = jax.NamedSharding(mesh, jax.P("d"))
        x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split)
        f = loaded(eqx.filter_export(top_level)(x))
        assert f.exported.nr_devices == 4
        out = f(jax.device_put(jnp.ones(8), split))
        assert out.tolist() == [2] * 8 and out.sharding.shard_shape((8,)) == (2,)

    def test_program_can_be_read(self):
        assert "stablehlo" in eqx.filter_export(top_level)(FLOAT).exported.mlir_module()

    def test_missing_package_is_named(self, monkeypatch):
        exported = eqx.filter_export(top_level)(FLOAT)

        def fail(vjp_order):
            raise ImportError("no flatbuffers")

        object.__setattr__(exported.exported, "serialize", fail)
        with pytest.raises(ImportError, match="pip install flatbuffers"):
            exported.serialize()


class TestBytes:
    def test_damaged_bytes_are_refused(self):
        data = eqx.filter_export(top_level)(FLOAT).serialize()
        for bad in (b"", b"text", data[:10], data[:-1], data + b"x", b"x" + data):
            with pytest.raises(ValueError, match="not an exported function"):
                eqx.deserialize_export(bad)
        for i in range(0, len(data), max(1, len(data) // 50)):
            bad = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
            with pytest.raises(ValueError, match="not an exported function"):
                eqx.deserialize_export(bad)

    def test_another_process_needs_neither_function_nor_class(self, tmp_path):
        f = eqx.filter_export(lambda x, mode: {"y": model()(x), "mode": mode})
        (tmp_path / "f").write_bytes(f(FLOAT, "fast").serialize())
        code = (
            "import pathlib, sys, jax.numpy as jnp, equinox_like as eqx\n"
            "f = eqx.deserialize_export(pathlib.Path('f').read_bytes())\n"
            "out = f(jnp.ones(3), 'fast')\n"
            "print(out['mode'], out['y'].tolist())\n"
            "try:\n"
            "    f(jnp.ones(3), mode='slow')\n"
            "except TypeError as e:\n"
            "    print(e)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first == f"fast {model()(jnp.ones(3)).tolist()}"
        assert (
            "`mode` was the static value 'fast', and is now the static value 'slow'"
            in second
        )


def structure_of(tree):
    return eqx.internal.split(tree, lambda leaf: eqx.internal.STATIC)[1]


SCALARS = st.one_of(st.booleans(), st.integers(0, 2), st.floats(), st.text())
DTYPES = st.sampled_from([None, jnp.float32, jnp.bfloat16])
POLICIES = st.builds(eqx.nn.Policy, DTYPES, DTYPES)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(),
        st.binary(),
        st.sampled_from(
            [jnp.tanh, Model, top_level, Colour.RED, np.dtype("int8"), ...]
        ),
        st.builds(range, st.integers(0, 3), st.integers(0, 3)),
        # In Python 3.11, a slice is no argument, but may be in a static field.
        st.builds(lambda *x: Model(1, size=slice(*x)), SCALARS, SCALARS),
        st.builds(Config, SCALARS),
        st.builds(OfAttrs, SCALARS),
        st.builds(lambda policy: Model(1, size=policy), POLICIES),
        st.builds(lambda x: Model(1, size=structure_of([x, 2])), SCALARS),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(lambda a, b: Model(a, size=b), inner, st.integers()),
    ),
    max_leaves=8,
)


class TestDescriptions:
    @settings(max_examples=60)
    @given(VALUES, VALUES)
    def test_they_are_the_same_exactly_if_the_skeletons_are(self, a, b):
        for x, y in ((a, b), (a, a), (b, a)):
            text = json.dumps(stored(describe("x", x)))
            found = first_difference(json.loads(text), describe("x", y))
            assert (found is None) == (structure_of(x) == structure_of(y))

    def test_ignored_field_of_a_dataclass_is_not_described(self):
        assert (
            first_difference(
                describe("x", Config(1, ignored=2)), describe("x", Config(1))
            )
            is None
        )

    def test_value_with_an_equality_of_its_own_cannot_be_stored(self):
        with pytest.raises(ValueError, match=r"`x.size` is the static value Even"):
            stored(describe("x", Model(1, size=Even(2))))


@dataclasses.dataclass(frozen=True)
class Even:
    number: int

    def __eq__(self, other):
        return self.number % 2 == other.number % 2

    def __hash__(self):
        return self.number % 2


WRAPPED = {
    "mixed": (lambda model: eqx.nn.mixed(model, "compute=bf16"), lambda m, x: m(x)),
    "EMA": (lambda model: eqx.nn.EMA(model, 0.9), lambda e, x: e.model()(x)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_model_in_a_wrapper_is_an_argument(name):
    wrap, call = WRAPPED[name]
    x = jnp.ones(2)
    models = [eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(i)) for i in (0, 1)]
    data = eqx.filter_export(call)(wrap(models[0]), x).serialize()
    again = eqx.deserialize_export(data)
    for model in models:
        assert jnp.allclose(again(wrap(model), x), call(wrap(model), x), rtol=1e-2)
    other = eqx.nn.MLP(2, 2, 4, 1, jax.nn.gelu, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"activation` was .*, and is now .*gelu"):
        again(wrap(other), x)


def test_dataclass_as_an_argument_is_compared_by_value_and_type():
    again = eqx.deserialize_export(
        eqx.filter_export(lambda config, x: config.value * x)(
            Config(2), jnp.ones(2)
        ).serialize()
    )
    assert again(Config(2), jnp.ones(2)).tolist() == [2, 2]
    for other in (Config(3), Config(2.0)):
        with pytest.raises(
            TypeError, match=r"`config` was .*Config\(value=2\), and is"
        ):
            again(other, jnp.ones(2))
