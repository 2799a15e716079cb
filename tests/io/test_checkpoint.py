"""`save` and `load`: what goes into a file by its path comes back, or an error says why."""

import bz2
import gzip
import io
import json
import os
import pickle
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from jax.sharding import NamedSharding, PartitionSpec as P
from strategies import OWN_PRNG, same, whole_trees

import equinox_like as eqx

FLOATS = [
    getattr(jnp, name)
    for name in (
        "float16",
        "bfloat16",
        "float32",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn",
    )
]
OTHERS = [
    jnp.bool_,
    jnp.int4,
    jnp.uint4,
    jnp.int8,
    jnp.uint16,
    jnp.int32,
    jnp.complex64,
]


class Net(eqx.Module):
    layers: list
    scale: Any = 1.0
    name: str = eqx.field(static=True, default="net")


def round_trip(tree, tmp_path, like=None, **kwargs):
    eqx.save(tmp_path / "saved", tree)
    return eqx.load(tmp_path / "saved", tree if like is None else like, **kwargs)


class TestRoundTrip:
    @given(whole_trees())
    def test_every_tree_comes_back(self, tmp_path_factory, tree):
        again = round_trip(tree, tmp_path_factory.mktemp("saved"))
        leaves, treedef = jtu.tree_flatten(tree)
        again_leaves, again_treedef = jtu.tree_flatten(again)
        assert treedef == again_treedef
        assert all(map(same, leaves, again_leaves))

    @pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=lambda d: d.dtype.name)
    @pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
    @pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
    def test_every_dtype_and_shape_survives(self, tmp_path, dtype, make, shape):
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        leaf = make(values.astype(jnp.dtype(dtype)))
        (again,) = round_trip([leaf], tmp_path)
        assert same(leaf, again) and again.shape == shape

    @pytest.mark.parametrize("dtype", ["f8", ">f4", "i8", "u8", "c16", ">i2"])
    def test_numpy_keeps_what_jax_would_narrow(self, tmp_path, dtype):
        leaf = np.arange(6).astype(dtype).reshape(2, 3).T
        (again,) = round_trip([leaf], tmp_path)
        assert again.dtype == leaf.dtype and np.array_equal(leaf, again)
        again[0] = 1  # it is the user's own

    @pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "c16"])
    def test_template_of_structs_has_what_jax_makes_of_numpy(self, tmp_path, dtype):
        def make():
            array = np.arange(6).astype(dtype).reshape(2, 3)
            return Net([array], scale=jnp.ones(()))

        like = eqx.filter_eval_shape(make)
        assert like.layers[0].dtype != np.dtype(dtype)
        again = round_trip(make(), tmp_path, like)
        assert same(again.layers[0], jnp.asarray(make().layers[0]))

    @pytest.mark.parametrize(
        ("saved", "dtype"),
        [
            (np.array([1, 2**31]), jnp.int32),
            (np.array([2**32], "u8"), jnp.uint32),
        ],
    )
    def test_integer_that_would_change_is_refused_by_its_path(
        self, tmp_path, saved, dtype
    ):
        like = {"a": jax.ShapeDtypeStruct(saved.shape, dtype)}
        with pytest.raises(
            eqx.LeafError, match=r"path \['a'\]: it has integers .*cannot"
        ):
            round_trip({"a": saved}, tmp_path, like)

    @pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "c16"])
    def test_struct_of_a_dtype_that_jax_lacks_is_refused(self, tmp_path, dtype):
        like = {"a": jax.ShapeDtypeStruct((1,), dtype)}
        saved = {"a": np.array([2**40 + 1], dtype)}
        with pytest.raises(
            eqx.LeafError, match=r"`\['a'\]` has the dtype .*`jax_enable_x64`"
        ):
            round_trip(saved, tmp_path, like)
        with jax.enable_x64(True):
            again = round_trip(saved, tmp_path, like)
        assert same(np.asarray(again["a"]), saved["a"])

    @pytest.mark.parametrize("dtype", [float, int, complex])
    @pytest.mark.parametrize("is_weak", [False, True])
    def test_jax_array_of_64_bits_is_not_narrowed(self, tmp_path, dtype, is_weak):
        def make():
            return jnp.asarray(dtype(2)) if is_weak else jnp.ones(2, dtype)

        with jax.enable_x64(True):
            saved = make()
            assert same(round_trip(saved, tmp_path, eqx.filter_eval_shape(make)), saved)
        with pytest.raises(eqx.LeafError, match=r"in the file, but .* in `like`"):
            eqx.load(tmp_path / "saved", eqx.filter_eval_shape(make))

    def test_struct_of_another_dtype_is_refused(self, tmp_path):
        like = [jax.ShapeDtypeStruct((2,), jnp.float32)]
        with pytest.raises(eqx.LeafError, match=r"`\[0\]` is int64\[2\] in the file"):
            round_trip([np.arange(2)], tmp_path, like)

    @pytest.mark.parametrize("shape", [(), (8,), (0,)])
    @pytest.mark.parametrize("is_struct", [False, True])
    @pytest.mark.parametrize("is_sharded", [False, True])
    def test_weak_dtypes_survive(self, tmp_path, shape, is_struct, is_sharded):
        weak, strong = jnp.full(shape, 0.5), jnp.full(shape, 0.5, jnp.float32)
        assert weak.weak_type and not strong.weak_type
        tree, like = {"a": weak, "b": strong}, {"a": strong, "b": weak}
        mesh = jax.make_mesh((4,), ("x",))
        place = NamedSharding(mesh, P("x") if shape else P()) if is_sharded else None
        if is_struct:
            like = eqx.filter_eval_shape(lambda: like)
        again = round_trip(tree, tmp_path, like, shardings=place)
        assert eqx.tree_equal(again, tree, check_weak_type=True)
        assert place is None or again["a"].sharding == place

    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg", OWN_PRNG], ids=str)
    def test_typed_keys_survive(self, tmp_path, impl):
        keys = jax.random.split(jax.random.key(3, impl=impl), 2)
        again = round_trip({"one": keys[0], "two": keys}, tmp_path)
        assert same(again["two"], keys) and same(again["one"], keys[0])

    @pytest.mark.parametrize(
        "number", [True, 3, -(2**63), 0.1, -0.0, float("nan"), float("inf"), 1 - 0.5j]
    )
    def test_python_numbers_survive(self, tmp_path, number):
        (again,) = round_trip([number], tmp_path)
        assert same(again, number)

    def test_whatever_is_no_data_is_taken_from_like(self, tmp_path):
        eqx.save(tmp_path / "m", Net([jnp.ones(2), "text", None, len]))
        like = Net([jnp.zeros(2), "other", None, abs], name="like")
        loaded = eqx.load(tmp_path / "m", like)
        assert loaded.layers[1:] == ["other", None, abs] and loaded.name == "like"
        assert loaded.layers[0].tolist() == [1.0, 1.0]

    def test_structs_may_stand_for_arrays(self, tmp_path):
        tree = Net([jnp.ones(2), jax.random.key(1)], scale=jnp.ones(()))
        again = round_trip(tree, tmp_path, jax.eval_shape(lambda: tree))
        assert same(again.layers[1], tree.layers[1])
        assert isinstance(again.layers[0], jax.Array)

    def test_single_leaf_and_empty_tree(self, tmp_path):
        assert same(round_trip(jnp.ones(2), tmp_path), jnp.ones(2))
        assert round_trip({"a": None, "b": []}, tmp_path) == {"a": None, "b": []}

    def test_arrays_go_where_those_of_like_are(self, tmp_path):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, jax.P("x"))
        tree = {
            "sharded": jax.device_put(jnp.arange(8.0), sharding),
            "placed": jax.device_put(jnp.ones(2), jax.devices()[2]),
            "free": jnp.ones(2),
        }
        again = round_trip(tree, tmp_path)
        assert again["sharded"].sharding == sharding
        assert again["placed"].devices() == {jax.devices()[2]}
        assert not again["free"].committed
        assert all(same(tree[name], again[name]) for name in tree)
        struct = {"sharded": jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)}
        loaded = eqx.load(tmp_path / "saved", struct, strict=False)
        assert loaded["sharded"].sharding == sharding

    def test_arrays_go_where_shardings_say(self, tmp_path):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        rules = [("layers[0]", jax.P("x")), ("**", jax.P())]
        tree = Net([jnp.arange(8.0), jax.random.key(1), np.ones(3)])
        where = eqx.Layout(mesh, rules).shardings(tree)
        again = round_trip(tree, tmp_path, shardings=where)
        assert [x.sharding for x in again.layers[:2]] == where.layers[:2]
        assert all(map(same, again.layers, tree.layers))
        assert isinstance(again.layers[2], np.ndarray)
        device = jax.devices()[1]
        for one in device, jax.sharding.SingleDeviceSharding(device):
            again = round_trip(tree, tmp_path, shardings=one)
            assert again.layers[0].devices() == {device}

    def test_arrays_of_a_template_go_to_the_mesh_in_use(self, tmp_path):
        explicit = (jax.sharding.AxisType.Explicit,)
        mesh = jax.make_mesh((4,), ("x",), axis_types=explicit)
        where = jax.NamedSharding(mesh, jax.P("x"))
        tree = {"a": jax.device_put(jnp.arange(8.0), where)}
        like = eqx.filter_eval_shape(lambda: tree)
        with jax.set_mesh(mesh):
            again = round_trip(tree, tmp_path, like)
        assert again["a"].sharding == where and same(again["a"], tree["a"])
        with pytest.raises(
            eqx.LeafError, match=r"`\['a'\]` .* `jax.set_mesh\(mesh\)`"
        ) as caught:
            eqx.load(tmp_path / "saved", like)
        assert caught.value.path == (jax.tree_util.DictKey("a"),)

    def test_a_sharding_that_does_not_fit_is_an_error(self, tmp_path):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        by = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))  # noqa: E731
        for wrong in (by("x"), by(None, "x"), by(None, None), jax.P("x")):
            with pytest.raises(
                eqx.LeafError, match=r"`layers\[0\]` \(float32\[6\]\)"
            ) as caught:
                round_trip(Net([jnp.ones(6)]), tmp_path, shardings=wrong)
            assert jax.tree_util.keystr(caught.value.path) == ".layers[0]"
        with pytest.raises(ValueError, match="`shardings` must be a prefix of `like`"):
            round_trip(Net([jnp.ones(6)]), tmp_path, shardings=[None])

    def test_donating_what_was_loaded_leaves_the_file_alone(self, tmp_path):
        step = eqx.filter_jit(lambda x: x + 1, donate="all")
        tree = {"x": jnp.arange(1024.0)}
        for _ in range(3):
            loaded = round_trip(tree, tmp_path)
            assert step(loaded["x"])[1] == 2.0
        assert same(eqx.load(tmp_path / "saved", tree)["x"], tree["x"])


class TestFile:
    def test_other_programs_read_it_by_the_paths(self, tmp_path):
        model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
        eqx.save(tmp_path / "m", {"model": model, "step": 3}, metadata={"by": "us"})
        tensors = safetensors.numpy.load_file(tmp_path / "m.safetensors")
        assert "['model'].layers[0].weight" in tensors and tensors["['step']"] == 3
        eqx.save(tmp_path / "n", model)
        names = set(safetensors.numpy.load_file(tmp_path / "n.safetensors"))
        assert {"layers[0].weight", "layers[1].bias"} <= names

    def test_it_reads_what_other_programs_wrote(self, tmp_path):
        path = tmp_path / "foreign.safetensors"
        tensors = {"layers[0]": np.ones(3, "float32"), "scale": np.float64(2.0)}
        safetensors.numpy.save_file(
            {k: np.asarray(v) for k, v in tensors.items()}, path, {"format": "np"}
        )
        loaded = eqx.load(path, Net([jnp.zeros(3)]))
        assert loaded.scale == 2.0 and loaded.layers[0].sum() == 3.0
        assert eqx.load_metadata(path) == {"format": "np"}

    def test_data_are_aligned_for_jax(self, tmp_path):
        tree = {"a": jnp.ones(3, jnp.int8), "b": jnp.ones(64), "c": jnp.ones(1000)}
        eqx.save(tmp_path / "m", tree)
        raw = (tmp_path / "m.safetensors").read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        assert (8 + size) % 64 == 0
        header = json.loads(raw[8 : 8 + size])
        assert header["['b']"]["data_offsets"][0] % 64 == 0
        assert header["['a']"]["data_offsets"][0] > header["['c']"]["data_offsets"][0]

    def test_suffix_is_added_only_where_there_is_none(self, tmp_path):
        eqx.save(str(tmp_path / "a"), [1])
        eqx.save(os.fsencode(tmp_path / "b.st"), [1])
        assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.st"]

    def test_metadata_come_back(self, tmp_path):
        eqx.save(tmp_path / "m", [1], metadata={"a": "ü\n", "format": "pt"})
        assert eqx.load_metadata(tmp_path / "m") == {"a": "ü\n", "format": "pt"}
        eqx.save(tmp_path / "m", [1])
        assert eqx.load_metadata(tmp_path / "m") == {}

    @pytest.mark.parametrize(
        ("metadata", "error", "match"),
        [
            ({"a": 1}, TypeError, "metadata"),
            ({"equinox_like": "x"}, ValueError, "'equinox_like'"),
        ],
    )
    def test_metadata_that_cannot_be_kept_are_refused(
        self, tmp_path, metadata, error, match
    ):
        with pytest.raises(error, match=match):
            eqx.save(tmp_path / "m", [1], metadata=metadata)
        assert os.listdir(tmp_path) == []

    def test_newer_version_is_refused(self, tmp_path):
        eqx.save(tmp_path / "m", [1])
        path = tmp_path / "m.safetensors"
        raw = path.read_bytes()
        newer = raw.replace(rb"{\"version\":1", rb"{\"version\":2")
        assert newer != raw
        path.write_bytes(newer)
        with pytest.raises(RuntimeError, match=r"version 2 .* reads version 1"):
            eqx.load(path, [1])

    def test_without_the_package_the_error_says_what_to_install(self, tmp_path):
        code = (
            "import sys; sys.modules['safetensors'] = None\n"
            "import equinox_like as eqx\n"
            f"eqx.save({str(tmp_path / 'm')!r}, [1])\n"
            f"eqx.load({str(tmp_path / 'm')!r}, [1])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True
        )
        assert "pip install safetensors" in done.stderr


class TestOpenFiles:
    def test_it_comes_back_after_what_was_written_before(self):
        tree, file = Net([jnp.arange(3.0)], 0.5), io.BytesIO()
        file.write(b"first line\n")
        eqx.save(file, tree, metadata={"step": "3"})
        for read in (
            lambda: eqx.tree_equal(eqx.load(file, Net([jnp.zeros(3)], 0.0)), tree),
            lambda: eqx.load_metadata(file) == {"step": "3"},
        ):
            file.seek(0)
            assert file.readline() == b"first line\n"
            assert read()
            assert file.read() == b""

    @pytest.mark.parametrize("module", [gzip, bz2])
    def test_compressed_file_comes_back(self, module, tmp_path):
        tree = {"w": jnp.arange(5.0), "n": 3}
        with module.open(tmp_path / "packed", "wb") as file:
            eqx.save(file, tree)
        with module.open(tmp_path / "packed", "rb") as file:
            loaded = eqx.load(file, {"w": jnp.zeros(5), "n": 0})
        assert eqx.tree_equal(loaded, tree)

    def test_file_needs_no_other_method_than_to_read_and_write_in_order(self):
        class Pipe:
            """What was written first is read first."""

            def __init__(self):
                self.content = b""

            def write(self, data):
                self.content += data

            def read(self, size):
                data, self.content = self.content[:size], self.content[size:]
                return data

        pipe = Pipe()
        eqx.save(pipe, [jnp.arange(5.0)])
        assert eqx.load(pipe, [jnp.zeros(5)])[0].tolist() == [0, 1, 2, 3, 4]

    def test_content_is_that_of_a_file_by_its_path(self, tmp_path):
        file, tree = io.BytesIO(), [jnp.arange(3.0), 2]
        eqx.save(file, tree)
        eqx.save(tmp_path / "a", tree)
        assert file.getvalue() == (tmp_path / "a.safetensors").read_bytes()

    def test_nothing_is_written_if_a_leaf_cannot_be_saved(self):
        file = io.BytesIO()
        with pytest.raises(eqx.LeafError, match=r"path \[1\]"):
            eqx.save(file, [jnp.ones(2), np.array([object()])])
        assert file.getvalue() == b""

    def test_errors_name_the_file(self, tmp_path):
        file = io.BytesIO()
        eqx.save(file, {"w": jnp.ones(2)})
        with pytest.raises(RuntimeError, match=r"the BytesIO is not.*`file.seek\(0\)`"):
            eqx.load(file, {"w": jnp.ones(2)})
        (tmp_path / "a").write_bytes(file.getvalue()[:-1])
        with open(tmp_path / "a", "rb") as damaged:
            with pytest.raises(RuntimeError, match=f"^{tmp_path}/a is not .* damaged"):
                eqx.load(damaged, {"w": jnp.ones(2)})

    @pytest.mark.parametrize("mode", ["w", "r", "wb", "rb"])
    def test_other_modes_are_refused(self, mode, tmp_path):
        (tmp_path / "a").touch()
        with open(tmp_path / "a", mode) as file:
            with pytest.raises(ValueError, match="must be a file open in the mode"):
                if mode == "wb":
                    eqx.load_metadata(file)
                else:
                    eqx.save(file, {})

    def test_durable_needs_a_path(self):
        with pytest.raises(ValueError, match=r"needs a path.*os.fsync"):
            eqx.save(io.BytesIO(), {}, durable=True)

    @pytest.mark.parametrize("url", ["s3://bucket/model", b"gs://bucket/model"])
    def test_url_is_to_be_opened(self, url):
        with pytest.raises(
            ValueError, match=r"got the URL '\w+://bucket/model'\. Open"
        ):
            eqx.save(url, {})
        with pytest.raises(ValueError, match="pass the open file"):
            eqx.tree_deserialise_leaves(url, {})


class TestRename:
    RENAMES = (
        {"['head'].weight": "['old'].weight", "['head'].bias": "['old'].bias"},
        lambda path: path.replace("head", "old"),
    )

    @pytest.mark.parametrize("rename", RENAMES, ids=["dictionary", "function"])
    def test_leaves_are_found_by_other_paths(self, tmp_path, rename):
        linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        eqx.save(tmp_path / "m", {"old": linear, "n": 3})
        like = {"head": jax.tree.map(jnp.zeros_like, linear), "n": 0}
        loaded = eqx.load(tmp_path / "m", like, rename=rename)
        assert eqx.tree_equal(loaded, {"head": linear, "n": 3})

    def test_missing_and_left_over_paths_are_those_of_the_file(self, tmp_path):
        eqx.save(tmp_path / "m", {"a": 1, "b": 2})
        with pytest.raises(eqx.LeafError) as caught:
            eqx.load(tmp_path / "m", {"x": 0, "b": 0}, rename={"['x']": "y"})
        text = str(caught.value)
        assert "missing in the file: `y` for `['x']`\n" in text
        assert "only in the file: `['a']`" in text
        assert jtu.keystr(caught.value.path) == "['x']"

    def test_key_that_is_no_path_is_refused(self, tmp_path):
        eqx.save(tmp_path / "m", {"a": 1})
        with pytest.raises(
            ValueError, match=r"`rename` has keys that are not names in `like`: `b`"
        ):
            eqx.load(tmp_path / "m", {"a": 1}, rename={"b": "a"})

    def test_anything_but_a_dictionary_or_function_is_refused(
        self, tmp_path, without_type_checks
    ):
        eqx.save(tmp_path / "m", {"a": 1})
        rename: Any = [("a", "b")]
        with pytest.raises(
            TypeError, match="`rename` must be a dictionary or a functi"
        ):
            eqx.load(tmp_path / "m", {"a": 1}, rename=rename)


class TestErrors:
    def test_all_differences_are_listed_together(self, tmp_path):
        eqx.save(tmp_path / "m", Net([jnp.ones(3), jnp.ones(2), 1, jnp.ones(1)]))
        like = Net(
            [jnp.ones(4), jnp.ones(2, jnp.int32), 1.0], scale={"new": jnp.ones(1)}
        )
        with pytest.raises(eqx.LeafError) as caught:
            eqx.load(tmp_path / "m", like)
        message = str(caught.value)
        for line in (
            "`layers[0]` is float32[3] in the file, but float32[4] in `like`",
            "`layers[1]` is float32[2] in the file, but int32[2] in `like`",
            "`layers[2]` is a Python int in the file, but a Python float in `like`",
            "missing in the file: `scale['new']`",
            "only in the file: `layers[3]`, `scale`",
        ):
            assert line in message
        assert jtu.keystr(caught.value.path) == ".layers[0]"

    def test_options_that_help_are_named_if_names_differ(self, tmp_path):
        eqx.save(tmp_path / "m", {"a": 1, "b": 2})
        rename = "Pass `rename` if they have other names in the file. "
        strict = r"With `strict=False`, .* ignored\.$"
        for like, fix in (
            ({"a": 1}, ""),  # no leaf may have another name
            ({"a": 1, "b": 2, "c": 3}, ""),
            ({"a": 1, "c": 3}, rename),
        ):
            with pytest.raises(eqx.LeafError, match=rf"\n  {fix}{strict}"):
                eqx.load(tmp_path / "m", like)
        with pytest.raises(eqx.LeafError, match=r"other names in the file\.$"):
            eqx.load(tmp_path / "m", {"c": 1}, strict=False)
        with pytest.raises(eqx.LeafError, match=r"in `like`$"):
            eqx.load(tmp_path / "m", {"a": 1, "b": 2.0})
        with pytest.raises(
            eqx.LeafError, match=r"missing leaves are taken from `tree`"
        ):
            eqx.load_state_dict({"a": jnp.ones(2)}, {})

    def test_many_differences_are_cut_short(self, tmp_path):
        eqx.save(tmp_path / "m", [jnp.ones(1)] * 50)
        with pytest.raises(eqx.LeafError, match="30 more like these") as caught:
            eqx.load(tmp_path / "m", [jnp.ones(2)] * 50)
        assert len(str(caught.value)) < 3000

    def test_without_strict_the_rest_is_taken_from_like(self, tmp_path):
        eqx.save(tmp_path / "m", {"a": jnp.ones(2), "b": 3})
        like = {"a": jnp.zeros(2), "c": 5}
        loaded = eqx.load(tmp_path / "m", like, strict=False)
        assert loaded["c"] == 5 and loaded["a"].tolist() == [1, 1]
        with pytest.raises(eqx.LeafError, match=r"`\['b'\]` is a Python int"):
            eqx.load(tmp_path / "m", {"b": jnp.ones(2)}, strict=False)
        with pytest.raises(eqx.LeafError, match=r"missing in the file: `\['c'\]`"):
            struct = jax.ShapeDtypeStruct((), "float32")
            eqx.load(tmp_path / "m", {"c": struct}, strict=False)

    @pytest.mark.parametrize(
        ("leaf", "match"),
        [
            (np.array([object()]), "dtype object"),
            (np.array(["a"]), "dtype <U1"),
            (np.zeros(2, "M8[s]"), "datetime64"),
            (np.ma.masked_array([1.0], [True]), "lose its mask"),
            (2**64, "64 bits"),
            (jax.ShapeDtypeStruct((), "float32"), "no values"),
            (jax.new_ref(np.zeros(2)), r"save what it holds, `ref\[\.\.\.\]`"),
            (np.zeros(2, np.longdouble), "cannot be saved"),
            (
                np.array(["a"], np.dtypes.StringDType()),
                r"StringDType\(\) cannot be saved",
            ),
        ],
        ids=range(9),
    )
    def test_leaf_that_cannot_be_saved_is_named(self, tmp_path, leaf, match):
        with pytest.raises(eqx.LeafError, match=match) as caught:
            eqx.save(tmp_path / "m", {"a": [1, leaf]})
        assert "path ['a'][1]" in str(caught.value)
        assert jtu.keystr(caught.value.path) == "['a'][1]"
        assert os.listdir(tmp_path) == []

    def test_traced_array_is_named(self, tmp_path):
        @jax.jit
        def f(x):
            eqx.save(tmp_path / "m", {"x": x})

        with pytest.raises(eqx.LeafError, match=r"path \['x'\]: a traced array"):
            f(1.0)

    def test_deleted_array_is_named(self, tmp_path):
        x = jnp.ones(2)
        x.delete()
        match = r"path \['x'\]: Array has been deleted[^.]*float32\[2\]\.$"
        with pytest.raises(eqx.LeafError, match=match):
            eqx.save(tmp_path / "m", {"x": x})

    def test_leaf_named_like_the_metadata_is_refused(self, tmp_path):
        tree = type("Odd", (eqx.Module,), {"__annotations__": {"__metadata__": int}})(1)
        with pytest.raises(eqx.LeafError, match="__metadata__"):
            eqx.save(tmp_path / "m", tree)

    def test_missing_file_and_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            eqx.load(tmp_path / "nothing", [1])
        with pytest.raises(FileNotFoundError):
            eqx.save(tmp_path / "nowhere" / "m", [1])
        with pytest.raises(OSError):
            eqx.load(str(tmp_path) + "/.", [1])

    def test_failed_save_keeps_the_old_file(self, tmp_path):
        eqx.save(tmp_path / "m", [1])
        with pytest.raises(eqx.LeafError):
            eqx.save(tmp_path / "m", [object(), np.array([object()])])
        assert eqx.load(tmp_path / "m", [0]) == [1]
        assert os.listdir(tmp_path) == ["m.safetensors"]


KILLED = """
import os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")  # of forking
import numpy as np
import equinox_like as eqx

folder, kind = sys.argv[1:]
path = os.path.join(folder, "saved")
save, load = {
    "save": (eqx.save, eqx.load),
    "durable": (lambda p, t: eqx.save(p, t, durable=True), eqx.load),
    "serialise": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
}[kind]

def tree(version):
    return {f"w{i}": np.full(50_000, version) for i in range(8)} | {"version": version}

save(path, tree(0))
seen, longest = set(), 0.04
for seed in range(25):
    child = os.fork()
    if child == 0:
        for version in range(1 + 1000 * seed, 1_000_000):
            save(path, tree(version))
        os._exit(1)
    time.sleep(random.Random(seed).uniform(0.002, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    loaded = load(path, tree(0))
    assert all(np.all(x == loaded["version"]) for x in loaded.values())
    if loaded["version"] in seen:  # too soon, on a busy machine
        longest *= 1.5
    seen.add(loaded["version"])
assert len(seen) > 3, seen
print("sound")
"""


@pytest.mark.parametrize("kind", ["save", "durable", "serialise"])
def test_process_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), kind],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(eqx.__file__).parents[1])},
    )
    assert done.stdout == "sound\n", done.stderr


@pytest.mark.parametrize("durable", [False, True])
def test_durable_file_is_on_the_disk_before_it_replaces_the_old_one(
    tmp_path, monkeypatch, durable
):
    events = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("fsync folder" if is_folder else "fsync file")
        fsync(descriptor)

    def spy_replace(source, target):
        assert os.path.dirname(source) == os.path.dirname(target)
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    eqx.save(tmp_path / "model", [1.0], durable=durable)
    wanted = ["fsync file", "replace", "fsync folder"] if durable else ["replace"]
    assert events == wanted


@pytest.mark.skipif(sys.version_info < (3, 13), reason="a mapping keeps its file open")
def test_loaded_trees_keep_no_file_open(tmp_path):
    path = tmp_path / "model.safetensors"
    eqx.save(path, jnp.arange(1000.0))
    loaded = [eqx.load(path, jnp.zeros(1000)) for _ in range(10)]
    with os.scandir("/proc/self/fd") as entries:
        links = [os.readlink(e.path) for e in entries if os.path.exists(e.path)]
    assert str(path.resolve()) not in links
    assert all(x[-1] == 999 for x in loaded)


@pytest.mark.parametrize("suffix", ["safetensors", "eqx"])
def test_on_windows_files_are_not_mapped_so_that_they_can_be_replaced(
    monkeypatch, tmp_path, suffix
):
    monkeypatch.setattr("equinox_like._io.files._CAN_MAP", False)
    path = tmp_path / f"model.{suffix}"
    is_mapped = []
    replace = os.replace

    def spy_replace(source, target):
        maps = Path("/proc/self/maps").read_text()
        is_mapped.append(str(source) in maps or str(target) in maps)
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy_replace)
    save, load = (
        (eqx.save, eqx.load)
        if suffix == "safetensors"
        else (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves)
    )
    tree: Any = [jnp.arange(1000.0), 3]
    for _ in range(3):
        save(path, tree)
        tree = load(path, [jnp.zeros(1000), 0])
    assert is_mapped == [False] * 3
    assert tree[0][-1] == 999 and tree[1] == 3


def test_weak_array_stays_in_its_memory(tmp_path):
    eqx.save(tmp_path / "m", jnp.full((3,), 0.5))
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device, memory_kind="unpinned_host")
    loaded = eqx.load(tmp_path / "m", jax.device_put(jnp.zeros(3), place))
    assert loaded.weak_type and loaded.sharding == place


def test_errors_can_be_pickled():
    error = eqx.LeafError("message", (jtu.SequenceKey(0),))
    assert pickle.loads(pickle.dumps(error)).path == error.path


def test_transfer_guard_allows_loading(tmp_path):
    tree = {"x": jnp.arange(3.0), "key": jax.random.key(1)}
    eqx.save(tmp_path / "a", tree)
    eqx.tree_serialise_leaves(tmp_path / "b", tree)
    like = jax.tree.map(jnp.empty_like, tree)
    with jax.transfer_guard("disallow"):
        loaded = [
            eqx.load(tmp_path / "a", like),
            eqx.tree_deserialise_leaves(tmp_path / "b", like),
            eqx.load_state_dict(like, eqx.state_dict(tree)),
        ]
    assert all(eqx.tree_equal(x, tree) for x in loaded)


def test_file_of_pytorch_is_refused_with_what_reads_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("model/data.pkl", b"")
    with pytest.raises(RuntimeError, match=r"`torch\.load`"):
        eqx.load(tmp_path / "model.pt", jnp.zeros(2))


def code_at_the_end(error):
    return str(error.value).rpartition(": `")[2].removesuffix("`.")


@pytest.mark.parametrize("load", [eqx.load, eqx.tree_deserialise_leaves])
@pytest.mark.parametrize("more", [{}, {"opt_state": [jnp.ones(2)], "a": 3}])
def test_item_of_a_saved_dictionary_is_answered_by_the_call(tmp_path, load, more):
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    path, like = tmp_path / "m.eqx", jax.tree.map(jnp.zeros_like, model)
    save = eqx.save if load is eqx.load else eqx.tree_serialise_leaves
    save(path, {"model": model} | more)
    with pytest.raises(eqx.LeafError) as error:
        load(path, like)
    code = code_at_the_end(error)
    assert code.startswith(f"eqx.{load.__name__}(path, {{'model': like")
    if ", ..." in code:  # this format has all leaves in order
        assert more and load is not eqx.load
        code = code.replace("...", "**more")
    loaded = eval(code, {"eqx": eqx, "path": path, "like": like, "more": more})
    assert eqx.tree_equal(loaded, model)

    save(path, model)
    with pytest.raises(eqx.LeafError) as error:
        load(path, {"model": like} | more)
    loaded = eval(
        code_at_the_end(error),
        {"eqx": eqx, "path": path, "like": {"model": like} | more},
    )
    assert eqx.tree_equal(loaded, {"model": model} | more)


GROWN = {
    "numbers": [1.0, 2.0, 3.0],
    "arrays": [np.ones(2)] * 3,
    "a tuple": (1, 2, 3),
    "dictionaries": [{"loss": 0.5, "accuracy": 1.0}] * 3,
    "by step": {10: 0.5, 20: 0.25, 30: 0.125},
    "by name of step": {"step 10": 0.5, "step 20": 0.25, "step 30": 0.125},
}


@pytest.mark.parametrize("history", GROWN.values(), ids=GROWN)
@pytest.mark.parametrize("load", [eqx.load, eqx.tree_deserialise_leaves])
@pytest.mark.parametrize("lengths", [(3, 0), (3, 1), (1, 3), (0, 3)])
def test_list_that_has_grown_is_answered_by_metadata(tmp_path, history, load, lengths):
    def tree(length):
        if isinstance(history, dict):
            return {
                "history": dict(list(history.items())[:length]),
                "model": jnp.ones(2),
            }
        return {"history": history[:length], "model": jnp.ones(2)}

    saved, like = map(tree, lengths)
    save = eqx.save if load is eqx.load else eqx.tree_serialise_leaves
    save(tmp_path / "m.eqx", saved)
    with pytest.raises(RuntimeError) as error:
        load(tmp_path / "m.eqx", like)
    hint = (
        "If `['history']` grows in training, save it as text: by `metadata=` of `save`"
    )
    assert hint in str(error.value) and "rename" not in str(error.value)
    like = {"history": saved["history"], "model": jnp.zeros(2)}  # as many items
    assert eqx.tree_equal(load(tmp_path / "m.eqx", like), saved)


@pytest.mark.parametrize("load", [eqx.load, eqx.tree_deserialise_leaves])
def test_other_difference_is_not_answered_by_metadata(tmp_path, load):
    save = eqx.save if load is eqx.load else eqx.tree_serialise_leaves
    slope = eqx.nn.PReLU()
    for saved, like in (
        (eqx.nn.Sequential([slope] * 3), eqx.nn.Sequential([slope] * 2)),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"old": [1, 2]}, {"new": [1, 2]}),
    ):
        save(tmp_path / "m.eqx", saved)
        with pytest.raises(RuntimeError) as error:
            load(tmp_path / "m.eqx", like)
        assert "metadata" not in str(error.value)


def test_tree_of_other_names_has_no_such_answer(tmp_path):
    eqx.save(tmp_path / "m", {"model": {"w": jnp.ones(2)}})
    for like in ({"w": {"model": jnp.ones(2)}}, {"b": jnp.ones(2)}):
        with pytest.raises(eqx.LeafError, match="Pass `rename` if they have other"):
            eqx.load(tmp_path / "m", like)
