import collections
import concurrent.futures
import copy
import enum
import errno
import io
import json
import math
import os
import pathlib
import pickle
import resource
import signal
import stat
import subprocess
import sys
import textwrap

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from strategies import OWN_PRNG, whole_trees

import equinox_like as eqx
from equinox_like._io import files, serialise

JAX_DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16",
    "float32", "complex64", "bfloat16", "float8_e3m4", "float8_e4m3",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn", "int2", "int4", "uint2",
    "uint4",
]  # fmt: skip
NUMPY_DTYPES = [*JAX_DTYPES, "int64", "uint64", "float64", "complex128"]


class Affine(eqx.Module):
    weight: object
    bias: object = None
    name: object = eqx.field(static=True, default="affine")


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


def through_file(tree, like, **kwargs):
    """Saves to a stream and loads again."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, like, **kwargs)
    assert file.read() == b""
    return loaded


def same_leaf(a, b):
    """Whether two leaves have the same type, dtype, shape and bits."""
    if isinstance(a, jax.Array):
        if not (isinstance(b, jax.Array) and a.dtype == b.dtype):
            return False
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        return same_leaf(np.asarray(a), np.asarray(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return a is b or a == b


def same(a, b):
    return jtu.tree_structure(a) == jtu.tree_structure(b) and all(
        map(same_leaf, jtu.tree_leaves(a), jtu.tree_leaves(b))
    )


def blank(leaf):
    """Another leaf of the same type, shape and dtype."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        return jax.random.split(jax.random.key(99, impl=impl), leaf.shape)
    if isinstance(leaf, jax.Array):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic | bool | int | float | complex):
        return type(leaf)(0)
    return leaf


def struct(leaf):
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def numpy_records(file):
    """All records that `numpy.load` finds, and where each begins."""
    records = []
    while True:
        start = file.tell()
        try:
            records.append((start, np.load(file)))
        except EOFError:
            return records


# Laws


@given(whole_trees(), st.sampled_from([lambda x: x, blank, struct]))
def test_loading_gives_what_was_saved(tree, make_like):
    assert same(through_file(tree, jtu.tree_map(make_like, tree)), tree)


@given(whole_trees())
def test_loading_by_path_gives_what_was_saved(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("saved") / "tree"
    eqx.tree_serialise_leaves(path, tree)
    assert same(eqx.tree_deserialise_leaves(path, jtu.tree_map(blank, tree)), tree)
    assert [p.name for p in path.parent.iterdir()] == ["tree.eqx"]


@given(whole_trees(), whole_trees())
def test_tree_of_another_structure_is_never_loaded(tmp_path_factory, tree, other):
    def data_paths(tree):
        return [p for p, x in jtu.tree_leaves_with_path(tree) if eqx.is_array_like(x)]

    assume(data_paths(tree) != data_paths(other))
    path = tmp_path_factory.mktemp("saved") / "tree"
    eqx.tree_serialise_leaves(path, tree)
    with pytest.raises(RuntimeError):
        eqx.tree_deserialise_leaves(path, other)


@given(st.data())
def test_cut_file_is_an_error_wherever_it_is_cut(data):
    tree = {"a": jnp.arange(3.0), "b": [1, jax.random.key(0)]}
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree)
    size = data.draw(st.integers(0, file.tell() - 1))
    with pytest.raises(eqx.LeafError, match="Error at leaf with path") as info:
        eqx.tree_deserialise_leaves(io.BytesIO(file.getvalue()[:size]), tree)
    assert "file" in str(info.value)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_an_error_with_the_path(junk):
    for start in (b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00v\x00{"):
        with pytest.raises(eqx.LeafError, match=r"\['a'\]"):
            eqx.tree_deserialise_leaves(io.BytesIO(start + junk), {"a": jnp.ones(3)})


# Kinds of leaves


def zeros_and_ones(shape):
    return np.asarray(np.arange(math.prod(shape)).reshape(shape) % 2)


@pytest.mark.parametrize("dtype", JAX_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_every_dtype_of_jax_round_trips(dtype, shape):
    values = zeros_and_ones(shape)
    array = jnp.asarray(values.astype(jnp.dtype(dtype)))
    assert same(through_file(array, jnp.zeros(shape, dtype)), array)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_of_numpy_round_trips(dtype):
    dtype = jnp.dtype(dtype)
    for shape in [(), (3,), (2, 0)]:
        array = zeros_and_ones(shape).astype(dtype)
        assert same(through_file(array, np.zeros(shape, dtype)), array)
    scalar = dtype.type(1)
    assert same(through_file(scalar, dtype.type(0)), scalar)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12)[::-2],
        np.arange(3, dtype=">i4"),
        np.array(["a", "bc"]),
        np.array([b"a", b"bc"]),
        np.zeros(2, [("a", "f4"), ("b", "i8", (2,))]),
        np.zeros(2, jax.dtypes.float0),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.asfortranarray(np.ones((2, 3), ml_dtypes.bfloat16)),
    ],
    ids=lambda a: str(a.dtype),
)
def test_unusual_numpy_arrays_round_trip(array):
    assert same(through_file(array, np.zeros_like(array)), array)


@pytest.mark.parametrize(
    "number",
    [
        True,
        False,
        0,
        -1,
        2**40,
        2**64 - 1,
        0.1,
        -0.0,
        math.nan,
        math.inf,
        1e300,
        1j,
        complex(0.1, -0.0),
        Colour.BLUE,
    ],
    ids=repr,
)
def test_numbers_round_trip_exactly(number):
    like = Colour.RED if isinstance(number, Colour) else type(number)(1)
    assert same(through_file([number], [like]), [number])


@pytest.mark.parametrize(
    "impl", ["threefry2x32", "rbg", "unsafe_rbg", OWN_PRNG], ids=str
)
@pytest.mark.parametrize("shape", [(), (2, 3), (0,)], ids=str)
def test_typed_keys_round_trip(impl, shape):
    keys = jax.random.split(jax.random.key(5, impl=impl), shape)
    assert keys.shape == shape
    other = jax.random.split(jax.random.key(6, impl=impl), shape)
    for like in (other, jax.ShapeDtypeStruct(shape, keys.dtype)):
        assert same(through_file({"k": keys}, {"k": like}), {"k": keys})


def test_leaves_that_are_no_data_come_from_like():
    saved = through_file(
        [jnp.ones(2), jnp.tanh, "old", None], [jnp.zeros(2), jnp.sin, "new", None]
    )
    assert saved[1:] == [jnp.sin, "new", None]
    assert jnp.array_equal(saved[0], jnp.ones(2))


def test_static_fields_come_from_like():
    loaded = through_file(
        Affine(jnp.ones(2), 1.5, name="old"), Affine(jnp.zeros(2), 0.0, name="new")
    )
    assert (loaded.bias, loaded.name) == (1.5, "new")
    assert jnp.array_equal(loaded.weight, jnp.ones(2))


def test_what_counts_is_the_kind_of_array_in_like():
    array = np.arange(3, dtype=np.float32)
    assert same(through_file([array], [jnp.zeros(3)]), [jnp.asarray(array)])
    assert same(through_file([jnp.asarray(array)], [np.zeros(3, "f4")]), [array])
    assert same(
        through_file([array.astype(">f4")], [jnp.zeros(3)]), [jnp.asarray(array)]
    )


def test_64_bit_data_are_narrowed_to_a_jax_array_of_32_bits():
    for saved, like in [(np.arange(3.0), jnp.zeros(3)), (5, jnp.asarray(0))]:
        loaded = through_file(saved, like)
        assert loaded.dtype == like.dtype and np.array_equal(loaded, saved)
    assert not through_file(1.0, jnp.asarray(0.0)).weak_type
    with pytest.raises(RuntimeError, match="integers in the file that int32 cannot"):
        through_file(np.array([2**31]), jnp.zeros(1, int))


def test_struct_of_a_dtype_that_jax_lacks_is_refused():
    like = jax.ShapeDtypeStruct((1,), "float64")
    with pytest.raises(eqx.LeafError, match=r"has the dtype float64.*`jax_enable_x64`"):
        through_file(np.ones(1), like)


def test_loaded_array_can_be_donated():
    loaded = through_file(jnp.ones(1000), jnp.zeros(1000))
    pointer = loaded.unsafe_buffer_pointer()
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded)
    assert loaded.is_deleted() and new.unsafe_buffer_pointer() == pointer


def test_number_loads_into_a_kind_that_holds_it_exactly():
    assert same(through_file([0.5], [np.float32(0)]), [np.float32(0.5)])
    assert same(through_file([jnp.float32(0.1)], [0.0]), [float(np.float32(0.1))])
    assert same(through_file([np.uint8(3)], [0]), [3])
    assert same(through_file([7], [np.uint8(0)]), [np.uint8(7)])
    assert same(through_file([math.nan], [np.float16(0)]), [np.float16("nan")])


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (2.5, 1), (2.0, 1), (7, True), (1, True), (True, 1), (7, 1.0), (1j, 1.0),
        (1.0, 1j), (0.1, np.float32(0)), (300, np.uint8(0)), (-1, np.uint8(0)),
        (1, np.float32(0)), (np.float64(1e300), np.float32(0)), (np.ones(1), 1.0),
        (np.datetime64("2020-01-01"), 1), (ml_dtypes.float8_e5m2(1), 1.0),
        (jax.random.key(0), 1), ("text", 1),
    ],
    ids=repr,
)  # fmt: skip
def test_number_that_does_not_fit_is_refused_by_its_path(saved, like):
    match = r"at path \['a'\]|at leaf with path \['a'\]: the file ends"
    with pytest.raises(eqx.LeafError, match=match):
        through_file({"a": saved}, {"a": like})


@pytest.mark.parametrize(
    "leaf",
    [2**70, np.array([object()]), np.array([1, "a"], object)],
    ids=["large", "object", "mixed"],
)
def test_what_needs_pickle_is_refused_by_its_path(leaf):
    with pytest.raises(eqx.LeafError, match="Error at leaf with path") as info:
        eqx.tree_serialise_leaves(io.BytesIO(), {"a": [1, leaf]})
    assert "['a'][1]" in str(info.value) and "Python objects" in str(info.value)
    assert info.value.path == (jtu.DictKey("a"), jtu.SequenceKey(1))
    assert isinstance(info.value.__cause__, TypeError)


def test_masked_array_is_refused_by_its_path():
    with pytest.raises(eqx.LeafError, match=r"path \['a'\]: .* lose its mask"):
        tree = {"a": np.ma.masked_array([1.0], [True])}
        eqx.tree_serialise_leaves(io.BytesIO(), tree)


def test_ref_is_refused_by_its_path():
    with pytest.raises(eqx.LeafError, match=r"path \['a'\]: .*`ref\[\.\.\.\]`"):
        tree = {"a": jax.new_ref(jnp.zeros(2))}
        eqx.tree_serialise_leaves(io.BytesIO(), tree)


def test_tracer_is_refused_by_its_path():
    with pytest.raises(eqx.LeafError, match=r"path \['a'\]"):
        jax.jit(lambda x: eqx.tree_serialise_leaves(io.BytesIO(), {"a": x}))(1.0)


# Differences between file and `like`


@pytest.mark.parametrize(
    ("saved", "like", "parts"),
    [
        (jnp.ones(2), jnp.ones(3), ["shape (2,)", "(3,)"]),
        (np.ones((2, 0)), np.ones((3, 0)), ["shape (2, 0)", "(3, 0)"]),
        (jnp.ones(2), jnp.arange(2), ["dtype float32", "int32"]),
        (np.ones(2), np.ones(2, np.float32), ["dtype float64", "float32"]),
        (jnp.ones(2, "float8_e5m2"), jnp.ones(2, "float8_e4m3fn"),
         ["dtype float8_e5m2", "float8_e4m3fn"]),
        (np.ones(2, "int4"), np.ones(2, "uint4"), ["dtype int4", "uint4"]),
        (jnp.ones(2, "bfloat16"), jnp.ones(2, "float16"), ["bfloat16", "float16"]),
        (jnp.ones((), jnp.uint32), jax.random.key(0), ["uint32", "key<fry>"]),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), ["key<fry>", "key<rbg>"]),
        (jax.random.key(0), jnp.ones(()), ["key<threefry2x32>", "float32"]),
        (2.5, 1, ["float64", "int"]),
    ],
    ids=lambda x: None,
)  # fmt: skip
def test_leaf_that_differs_is_refused_with_path_and_both_values(saved, like, parts):
    with pytest.raises(RuntimeError, match="Deserialised leaf at path") as info:
        through_file([0, Affine(saved)], [0, Affine(like)])
    message = str(info.value)
    assert "[1].weight" in message
    found, wanted = message.split("in the file, but ")
    assert parts[0] in found and parts[1] in wanted


@pytest.mark.parametrize(
    ("saved", "like", "parts"),
    [
        ({"a": 1.0, "b": 2.0}, [0.0, 0.0], ["`['a']`, `['b']`", "`[0]`, `[1]`"]),
        ({"a": 1.0, "b": 2.0}, {"a": 0.0, "c": 0.0}, ["`['b']`", "`['c']`"]),
        ([1.0], [0.0, 0.0], ["Only in the file: none", "`[1]`"]),
        ([1.0, 2.0], [0.0], ["in the file: `[1]`", "in `like`: none"]),
        (Affine(1.0), Affine(0.0, 0.0), ["in the file: none", "`bias`"]),
        ([jnp.ones(2), "text"], ["text", jnp.ones(2)], ["`[0]`", "`[1]`"]),
        (1.0, [0.0], ["`<root>`", "`[0]`"]),
    ],
    ids=lambda x: None,
)
def test_another_structure_is_refused_with_what_both_have(tmp_path, saved, like, parts):
    eqx.tree_serialise_leaves(tmp_path / "tree", saved)
    with pytest.raises(RuntimeError) as info:
        eqx.tree_deserialise_leaves(tmp_path / "tree", like)
    found, wanted = str(info.value).split("; only ")
    assert parts[0] in found and parts[1] in wanted


def test_another_order_is_refused_with_both(tmp_path):
    leaves = [("a", 1.0), ("b", 2.0)]
    eqx.tree_serialise_leaves(tmp_path / "tree", collections.OrderedDict(leaves))
    both = r"in the file is `\['a'\]`, `\['b'\]`; in `like` it is `\['b'\]`, `\['a'\]`"
    with pytest.raises(eqx.LeafError, match=both):
        like = collections.OrderedDict(reversed(leaves))
        eqx.tree_deserialise_leaves(tmp_path / "tree", like)


def test_path_in_an_error_begins_without_a_dot():
    with pytest.raises(eqx.LeafError, match="at path weight has shape"):
        through_file(Affine(jnp.ones(2)), Affine(jnp.ones(3)))


def test_structure_is_named_rather_than_its_consequence(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "tree", {"a": jnp.ones(2), "c": 1.0})
    like = {"b": jnp.ones(3), "c": 1.0}
    with pytest.raises(
        eqx.LeafError, match="structure of the saved tree differs"
    ) as info:
        eqx.tree_deserialise_leaves(tmp_path / "tree", like)
    assert info.value.path == (jtu.DictKey("b"),)


@pytest.mark.parametrize("saved_by", ["us", "equinox"])
def test_bytes_left_over_are_counted(tmp_path, saved_by):
    path = tmp_path / "tree.eqx"
    if saved_by == "us":
        eqx.tree_serialise_leaves(path, [1.0])
    else:
        with path.open("wb") as file:
            np.save(file, 1.0)
    with path.open("ab") as file:
        file.write(b"12345")
    with pytest.raises(RuntimeError, match="5 bytes of the file are left over"):
        eqx.tree_deserialise_leaves(path, [0.0])


def test_record_too_many_of_equinox_is_counted(tmp_path):
    path = tmp_path / "tree.eqx"
    with path.open("wb") as file:
        np.save(file, np.ones(2, np.float32))
        np.save(file, np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="140 bytes of the file are left over"):
        eqx.tree_deserialise_leaves(path, [jnp.ones(2)])


# Damaged and hostile files


def record_with(header):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def npy_header(descr="'<f4'", shape="(3,)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def test_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    file = io.BytesIO()
    np.save(file, np.array([Bomb()], object), allow_pickle=True)
    contents = [file.getvalue(), pickle.dumps(Bomb()), record_with(npy_header("'|O'"))]
    for content in contents:
        for like in (jnp.ones(1), np.array([None], object), 1.0, jax.random.key(0)):
            with pytest.raises(eqx.LeafError):
                eqx.tree_deserialise_leaves(io.BytesIO(content), like)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        record_with(npy_header(shape="(10**18,)")),
        record_with(npy_header(shape="(1000000000000000,)")),
        record_with(npy_header("'<f99'")),
        record_with(npy_header("'V9999999999999'", "()")),
        record_with(
            npy_header("[('key<threefry2x32>', '<u4', (1000000000000,))]", "()")
        ),
        record_with(npy_header("[('key<unknown>', '<u4', (2,))]", "()")) + bytes(8),
        record_with(npy_header("[('key<rbg>', '<u4', (2,))]", "()")) + bytes(8),
        record_with(npy_header(shape="(-1,)")),
        record_with(npy_header(shape="3")),
        record_with("{'descr': '<f4'}"),
        record_with("__import__('os').abort()"),
        record_with("(" * 100),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
        b"\x93NUMPY\x09\x00v\x00",
        b"PK\x03\x04 a zip file, as numpy.savez writes",
    ],
    ids=range(15),
)
def test_hostile_record_is_refused_by_its_path_at_once(content):
    for like in (jnp.ones(3), np.ones(3, np.float32), jax.random.key(0), 1.0):
        with pytest.raises(eqx.LeafError, match=r"path \['a'\]"):
            eqx.tree_deserialise_leaves(io.BytesIO(content), {"a": like})


def test_header_that_would_take_long_to_parse_is_refused():
    header = npy_header().encode().ljust(20_000)
    content = b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header
    with pytest.raises(eqx.LeafError, match="claims 20000 bytes"):
        eqx.tree_deserialise_leaves(io.BytesIO(content + bytes(12)), jnp.ones(3))


def test_declared_size_is_compared_with_the_file_before_memory_is_taken():
    like = jax.ShapeDtypeStruct((1 << 50,), jnp.float32)
    content = record_with(npy_header(shape=f"({1 << 50},)")) + bytes(100)
    with pytest.raises(
        eqx.LeafError, match="needs 4503599627370496 bytes, and 100 are"
    ):
        eqx.tree_deserialise_leaves(io.BytesIO(content), [like])


# Where it is written to


@pytest.mark.parametrize(
    "kind",
    [str, pathlib.Path, os.fsencode, "pathlike"],
    ids=["str", "Path", "bytes", ""],
)
@pytest.mark.parametrize(
    ("name", "written"),
    [("model", "model.eqx"), ("model.eqx", "model.eqx"), ("model.v1", "model.v1")],
)
def test_any_kind_of_path_is_taken_and_gets_a_suffix(tmp_path, kind, name, written):
    class PathLike:
        def __init__(self, path):
            self.path = path

        def __fspath__(self):
            return self.path

    path = (PathLike if kind == "pathlike" else kind)(str(tmp_path / name))
    tree = [jnp.arange(3.0), 2.5]
    eqx.tree_serialise_leaves(path, tree)
    assert os.listdir(tmp_path) == [written]
    assert same(eqx.tree_deserialise_leaves(path, jtu.tree_map(blank, tree)), tree)


def test_missing_file_or_folder_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.eqx"):
        eqx.tree_deserialise_leaves(tmp_path / "missing", [1])
    with pytest.raises(FileNotFoundError, match=r"missing/model\.eqx'"):
        eqx.tree_serialise_leaves(tmp_path / "missing" / "model", [1])


def test_trees_can_share_a_stream_and_need_only_read_and_write():
    class Stream:
        def __init__(self):
            self.bytes = io.BytesIO()
            self.write, self.read = self.bytes.write, self.bytes.read

    stream = Stream()
    first, second = {"a": jnp.ones(2), "b": 1}, [np.arange(3)]
    stream.write(b"start")
    eqx.tree_serialise_leaves(stream, first)
    eqx.tree_serialise_leaves(stream, second)
    stream.write(b"end")
    stream.bytes.seek(5)
    assert same(eqx.tree_deserialise_leaves(stream, first), first)
    assert same(eqx.tree_deserialise_leaves(stream, second), second)
    assert stream.read() == b"end"


def test_each_leaf_is_a_record_that_numpy_loads(tmp_path):
    key = jax.random.key(3)
    bf16 = jnp.asarray([1.5, 2.5], jnp.bfloat16)
    f8 = jnp.asarray([1.5, 2.0], jnp.float8_e5m2)
    tree = [jnp.arange(3.0), 0.1, key, bf16, f8, jnp.tanh, np.array(["a"])]
    eqx.tree_serialise_leaves(tmp_path / "tree", tree)
    with (tmp_path / "tree.eqx").open("rb") as file:
        records = [record for _, record in numpy_records(file)]
    assert len(records) == 7
    assert np.array_equal(records[0], np.arange(3.0)) and records[1] == 0.1
    assert np.array_equal(records[2]["key<threefry2x32>"], jax.random.key_data(key))
    assert records[3].dtype == np.dtype("V2")
    assert np.array_equal(records[3].view(ml_dtypes.bfloat16), bf16)
    assert records[4].dtype.names == ("float8_e5m2",)
    assert np.array_equal(records[4].view(ml_dtypes.float8_e5m2), f8)
    assert records[5] == np.array(["a"])
    names = [f"[{n}]" for n in (0, 1, 2, 3, 4, 6)]
    assert json.loads(records[6].item())["leaves"] == names


def test_files_of_equinox_are_loaded(tmp_path):
    tree = {
        "array": jnp.arange(3.0),
        "bfloat16": jnp.asarray([1.5, 2.5], jnp.bfloat16),
        "empty": jnp.ones((0, 3)),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "function": jnp.tanh,
        "numbers": [True, 2**40, 0.1, 1j],
        "small": [jnp.ones(2, "float8_e4m3fn"), np.ones(2, "int4")],
        "scalar": np.float32(2.5),
    }
    # Equinox 0.13.8 calls `numpy.save` on each leaf, which writes JAX's dtypes as raw
    # bytes; `float8_e5m2` gets a name that NumPy cannot read.
    odd = jnp.ones(2, "float8_e5m2")
    with (tmp_path / "tree.eqx").open("wb") as file:
        for leaf in jtu.tree_leaves(tree):
            if not callable(leaf):
                np.save(file, leaf)
        file.write(record_with(npy_header("'<f1'", "(2,)")) + np.asarray(odd).tobytes())
    tree["z"] = odd
    like = jtu.tree_map(blank, tree)
    assert same(eqx.tree_deserialise_leaves(tmp_path / "tree", like), tree)


# Nothing is lost


def test_old_file_survives_an_error_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, [1.0, 2.0])
    before = path.read_bytes()
    with pytest.raises(eqx.LeafError, match=r"path \[1\]"):
        eqx.tree_serialise_leaves(path, [3.0, 2**70])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.eqx"]


def test_file_that_is_replaced_while_it_is_read_is_read_to_its_end(
    tmp_path, monkeypatch
):
    path, find_index = tmp_path / "model.eqx", serialise.find_index

    def find_and_replace(file):
        found = find_index(file)
        eqx.tree_serialise_leaves(path, {"w": jnp.zeros(3)})
        return found

    monkeypatch.setattr(serialise, "find_index", find_and_replace)
    eqx.tree_serialise_leaves(path, {"w": jnp.ones(3)})
    loaded = eqx.tree_deserialise_leaves(path, {"w": jnp.zeros(3)})
    assert loaded["w"].tolist() == [1, 1, 1]


def test_interrupt_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, [1.0])
    before = path.read_bytes()

    def interrupt(file, leaf):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        eqx.tree_serialise_leaves(path, [1.0], interrupt)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.eqx"]


def test_interrupt_when_the_new_file_is_just_made_leaves_the_old_one(
    tmp_path, monkeypatch
):
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, [1.0])

    def make_and_interrupt(*args, **kwargs):
        open(*args, **kwargs).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "open", make_and_interrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        eqx.tree_serialise_leaves(path, [2.0])
    assert os.listdir(tmp_path) == ["model.eqx"]


def test_folder_in_the_place_of_the_file_is_named(tmp_path):
    (tmp_path / "model.eqx").mkdir()
    with pytest.raises(IsADirectoryError) as info:
        eqx.tree_serialise_leaves(tmp_path / "model", [1.0])
    assert info.value.filename == str(tmp_path / "model.eqx")
    assert str(info.value) == f"[Errno 21] Is a directory: '{info.value.filename}'"
    assert os.listdir(tmp_path) == ["model.eqx"]


@pytest.mark.parametrize("letter", ["n", "ü", "名"])
def test_file_may_have_the_longest_name_of_the_file_system(tmp_path, letter):
    path = tmp_path / (letter * (251 // len(letter.encode())) + ".eqx")
    path.touch()
    eqx.tree_serialise_leaves(path, [1.0])
    assert eqx.tree_deserialise_leaves(path, [0.0]) == [1.0]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("save", [eqx.save, eqx.tree_serialise_leaves])
@pytest.mark.parametrize("tree", [np.ones(50_000), [np.ones(1000)] * 50])
def test_full_disk_is_an_os_error_that_names_the_file(tmp_path, save, tree):
    save(tmp_path / "model", jnp.ones(3))
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system refuses to write more, as it does on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=path.name) as info:
            save(path, tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert info.value.errno == errno.EFBIG
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_error_of_a_filter_spec_about_another_file_names_the_leaf(tmp_path):
    def write(file, leaf):
        raise FileNotFoundError(errno.ENOENT, "no such file", "weights.bin")

    with pytest.raises(eqx.LeafError, match=r"\['w'\].*weights\.bin"):
        eqx.tree_serialise_leaves(tmp_path / "model", {"w": 1.0}, filter_spec=write)


def test_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.eqx"
    tree = [jnp.arange(3.0), jnp.ones(2)]
    eqx.tree_serialise_leaves(path, tree)
    code = f"""
        import sys, time
        import numpy as np
        import equinox_like as eqx

        def write_and_wait(file, leaf):
            if leaf is None:
                print("written", flush=True)
                time.sleep(60)
            file.write(leaf)
            file.flush()

        eqx.tree_serialise_leaves(
            {str(path)!r}, [b"half", None], write_and_wait, is_leaf=lambda x: x is None
        )
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with process:
        assert process.stdout.readline() == b"written\n"
        # The new contents are on their way, but not in place.
        (temporary,) = set(os.listdir(tmp_path)) - {"model.eqx"}
        assert (tmp_path / temporary).read_bytes() == b"half"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert same(eqx.tree_deserialise_leaves(path, jtu.tree_map(blank, tree)), tree)
    eqx.tree_serialise_leaves(path, [5.0])
    assert eqx.tree_deserialise_leaves(path, [0.0]) == [5.0]


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(tmp_path):
    (tmp_path / "ordinary").touch()
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, [1.0])
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    path.chmod(0o640)
    eqx.tree_serialise_leaves(path, [2.0])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_protected_file_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "model.eqx"
    eqx.tree_serialise_leaves(path, [1.0])
    path.chmod(0o440)
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(
        os,
        "access",
        lambda p, mode: mode != os.W_OK or bool(os.stat(p).st_mode & 0o200),
    )
    with pytest.raises(PermissionError, match=r"model\.eqx"):
        eqx.tree_serialise_leaves(path, [2.0])
    assert eqx.tree_deserialise_leaves(path, [0.0]) == [1.0]


def test_link_stays_a_link(tmp_path):
    (tmp_path / "link.eqx").symlink_to(tmp_path / "model.eqx")
    eqx.tree_serialise_leaves(tmp_path / "link", [1.0])
    assert (tmp_path / "link.eqx").is_symlink()
    assert eqx.tree_deserialise_leaves(tmp_path / "model", [0.0]) == [1.0]


# Other functions than the default


def test_filter_spec_may_be_a_prefix_of_the_tree(tmp_path):
    def save_double(file, leaf):
        np.save(file, 2 * leaf)

    def load_half(file, like):
        return jnp.asarray(np.load(file) / 2, like.dtype)

    def skip(file, leaf):
        return leaf

    tree = {"a": [jnp.ones(2), jnp.arange(2.0)], "b": jnp.ones(3), "c": 1.0}
    eqx.tree_serialise_leaves(
        tmp_path / "tree",
        tree,
        {"a": save_double, "b": skip, "c": eqx.default_serialise_filter_spec},
    )
    like = jtu.tree_map(blank, tree)
    loaded = eqx.tree_deserialise_leaves(
        tmp_path / "tree",
        like,
        {"a": load_half, "b": skip, "c": eqx.default_deserialise_filter_spec},
    )
    assert same(loaded, {**tree, "b": like["b"]})


def skip_matrices(file, leaf):
    if leaf.ndim != 2:
        eqx.default_serialise_filter_spec(file, leaf)


@pytest.mark.parametrize("as_tree", [list, dict])
def test_leaves_that_a_function_skipped_need_not_be_in_the_tree(as_tree, tmp_path):
    vector, matrix, scalar = jnp.arange(2.0), jnp.ones((2, 2)), jnp.array(3.0)
    tree, smaller = [vector, matrix, scalar], [vector, scalar]
    if as_tree is dict:
        tree = dict(zip("abc", tree, strict=True))
        smaller = dict(zip("xy", smaller, strict=True))
    eqx.tree_serialise_leaves(tmp_path / "tree", tree, skip_matrices)
    like = jtu.tree_map(blank, smaller)
    assert same(eqx.tree_deserialise_leaves(tmp_path / "tree", like), smaller)
    with pytest.raises(eqx.LeafError, match="structure of the saved tree differs"):
        eqx.tree_deserialise_leaves(tmp_path / "tree", jtu.tree_map(blank, tree))
    eqx.tree_serialise_leaves(tmp_path / "tree", smaller)
    with pytest.raises(eqx.LeafError, match="structure of the saved tree differs"):
        eqx.tree_deserialise_leaves(tmp_path / "tree", (jnp.ones(2), {"z": scalar}))


def test_function_may_read_several_records_which_are_checked_all_the_same(tmp_path):
    def load_second(file, like):
        np.load(file)
        return eqx.default_deserialise_filter_spec(file, like)

    spec = [eqx.default_deserialise_filter_spec, load_second]
    path = tmp_path / "tree.eqx"
    eqx.tree_serialise_leaves(path, [1.0, jnp.ones(3), 2.0])
    assert eqx.tree_deserialise_leaves(path, [0.0, 0.0], spec) == [1.0, 2.0]
    data = path.read_bytes().replace(np.ones(1, "f4").tobytes(), b"abcd", 1)
    path.write_bytes(data)
    with pytest.raises(eqx.LeafError, match=r"\[1\]: it is damaged"):
        eqx.tree_deserialise_leaves(path, [0.0, 0.0], spec)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
        (eqx.save, eqx.load),
    ],
)
@pytest.mark.parametrize("name", ["pipe", "pipe.eqx"])
def test_pipe_stays_a_pipe(save, load, name, tmp_path):
    pipe, file = tmp_path / name, tmp_path / "file.eqx"
    os.mkfifo(pipe)
    save(file, [jnp.arange(3.0)])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(pipe.read_bytes)
        save(pipe, [jnp.arange(3.0)])
        assert reading.result(60) == file.read_bytes()
        assert stat.S_ISFIFO(os.stat(pipe).st_mode)
        pool.submit(pipe.write_bytes, file.read_bytes())
        (loaded,) = load(pipe, [jnp.zeros(3)])
        assert loaded.tolist() == [0, 1, 2]


def test_path_of_an_error_below_a_prefix_is_whole():
    def fail(file, leaf):
        raise LookupError("no such thing")

    spec = {"a": fail, "b": eqx.default_serialise_filter_spec}
    with pytest.raises(eqx.LeafError, match="no such thing") as info:
        eqx.tree_serialise_leaves(io.BytesIO(), {"a": [[1]], "b": 2}, spec)
    keys = (jtu.DictKey("a"), jtu.SequenceKey(0), jtu.SequenceKey(0))
    assert info.value.path == keys
    assert "['a'][0][0]" in str(info.value)
    assert type(info.value.__cause__) is LookupError
    with pytest.raises(eqx.LeafError, match="no such thing") as info:
        eqx.tree_deserialise_leaves(io.BytesIO(), {"a": [[1]], "b": 2}, spec)
    assert info.value.path == keys
    assert str(copy.copy(info.value)) == str(info.value)


def test_is_leaf_hands_nodes_whole_to_the_function():
    seen = []

    def is_pair(x):
        return isinstance(x, tuple)

    def save(file, leaf):
        seen.append(leaf)

    eqx.tree_serialise_leaves(
        io.BytesIO(), {"a": (1, 2), "b": [3]}, save, is_leaf=is_pair
    )
    assert seen == [(1, 2), 3]
    loaded = eqx.tree_deserialise_leaves(
        io.BytesIO(),
        {"a": (1, 2), "b": [3]},
        lambda file, like: like[::-1] if is_pair(like) else like,
        is_leaf=is_pair,
    )
    assert loaded == {"a": (2, 1), "b": [3]}


@pytest.mark.parametrize(
    "spec", [{"b": len}, [len], {"a": [len, len, len]}], ids=["key", "type", "length"]
)
def test_filter_spec_that_is_no_prefix_is_refused_before_anything_is_written(
    tmp_path, spec
):
    with pytest.raises(ValueError, match="pytree structure error"):
        eqx.tree_serialise_leaves(tmp_path / "tree", {"a": [1, 2]}, spec)
    assert os.listdir(tmp_path) == []


def test_filter_spec_leaf_that_is_no_function_is_refused_by_its_path():
    with pytest.raises(ValueError, match=r"filter_spec\['a'\]"):
        eqx.tree_serialise_leaves(io.BytesIO(), {"a": [1]}, {"a": True})


def test_result_of_an_own_function_must_be_like_like():
    for like, result in [
        (jnp.ones(2), np.ones(2, np.float32)),
        (np.ones(2), jnp.ones(2)),
        (jnp.ones(2), jnp.ones(3)),
        (1, 1.0),
        (np.float32(1), np.ones((), np.float32)),
        (len, lambda x: x),
    ]:
        with pytest.raises(RuntimeError, match=r"Deserialised leaf at path \['a'\]"):
            eqx.tree_deserialise_leaves(
                io.BytesIO(), {"a": like}, lambda f, x, result=result: result
            )


def test_what_is_neither_path_nor_file_is_refused():
    with pytest.raises(TypeError, match=r"must be a path, or.*`write`; got an int\."):
        eqx.tree_serialise_leaves(5, jnp.ones(2))
    with pytest.raises(TypeError, match=r"must be a path, or.*`read`; got an int\."):
        eqx.tree_deserialise_leaves(5, jnp.ones(2))
    with pytest.raises(TypeError, match=r"the first argument, .*; got an Identity\."):
        eqx.tree_serialise_leaves(eqx.nn.Identity(), "path.eqx")


@pytest.mark.parametrize("x", [jnp.ones(2), jax.random.key(0)])
def test_traced_arrays_have_nothing_to_write(x):
    @eqx.filter_jit
    def write(tree):
        eqx.tree_serialise_leaves(io.BytesIO(), tree)

    with pytest.raises(eqx.LeafError, match=r"\['a'\].*save outside of `jit`"):
        write({"a": x})
