"""Whatever is saved can be loaded; what cannot is refused, and the old file stays."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import os
import pickle
import struct

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from strategies import same, whole_trees

import equinox_like as eqx
from equinox_like import orbax
from equinox_like._io.format import Tensor, header as header_of

BY_PATH = {
    ".safetensors": (eqx.save, eqx.load),
    ".eqx": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
}
formats = pytest.mark.parametrize("suffix", BY_PATH)
# With halves of pairs, which `os.fsdecode` makes of names that are not UTF-8.
odd = [
    "a",
    ".",
    "[",
    "]",
    "'",
    '"',
    "\\",
    "/",
    "\0",
    "\n",
    "\ud83d",
    "\ude00",
    "\udce9",
]
texts = st.lists(st.sampled_from(odd), max_size=4).map("".join) | st.text()


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a user's own; those of JAX have no lone surrogates."""

    name: str

    def __str__(self):
        return self.name


@jtu.register_pytree_with_keys_class
class Named:
    """A node with one child, of any name."""

    def __init__(self, name, child):
        self.name, self.child = name, child

    def tree_flatten_with_keys(self):
        return ((Key(self.name), self.child),), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(name, *children)


def saves_all_or_keeps(folder, suffix, tree, **options):
    """Whether `tree` was saved, and then comes back; else the old file must be there."""
    save, load = BY_PATH[suffix]
    path = folder / f"m{suffix}"
    save(path, [1])
    before = path.read_bytes()
    try:
        save(path, tree, **options)
    except (eqx.LeafError, ValueError) as error:
        assert os.listdir(folder) == [path.name] and path.read_bytes() == before
        assert str(error)
        return False
    again = load(path, tree)
    assert all(map(same, *map(jtu.tree_leaves, (again, tree))))
    return True


@given(tree=whole_trees(), metadata=st.dictionaries(texts, texts, max_size=3))
def test_metadata_are_kept_or_refused(tmp_path_factory, tree, metadata):
    folder = tmp_path_factory.mktemp("metadata")
    is_saved = saves_all_or_keeps(folder, ".safetensors", tree, metadata=metadata)
    text = "".join([*metadata, *metadata.values()])
    assert is_saved == (text.encode(errors="ignore").decode() == text)
    if is_saved:
        assert eqx.load_metadata(folder / "m") == metadata
        safetensors.numpy.load_file(folder / "m.safetensors")


def test_metadata_with_a_lone_surrogate_are_refused_with_what_to_do(tmp_path):
    metadata = {"data": os.fsdecode(b"caf\xe9.npz")}
    with pytest.raises(ValueError, match=r"'data' is mapped to 'caf\\udce9.npz'.*json"):
        eqx.save(tmp_path / "m", [1], metadata=metadata)
    texts = {key: json.dumps(value) for key, value in metadata.items()}
    eqx.save(tmp_path / "m", [1], metadata=texts)
    assert json.loads(eqx.load_metadata(tmp_path / "m")["data"]) == metadata["data"]


@formats
@given(name=texts, kind=st.sampled_from([Named, lambda name, x: {name: x}]))
def test_names_are_kept_or_refused(tmp_path_factory, suffix, name, kind):
    folder = tmp_path_factory.mktemp("names")
    is_saved = saves_all_or_keeps(folder, suffix, kind(name, {"x": jnp.ones(2)}))
    is_unicode = name.encode(errors="ignore").decode() == name
    assert is_saved or (kind is Named and not is_unicode)


@pytest.mark.parametrize("beyond", [0, 64])
def test_header_may_be_as_long_as_safetensors_reads(tmp_path, beyond):
    path = tmp_path / "m.safetensors"
    eqx.save(path, [1.0], metadata={"text": ""})
    before = path.read_bytes()
    (size,) = struct.unpack("<Q", before[:8])
    # The header and its length end at a multiple of 64.
    text = "x" * (99_999_992 - size + beyond)
    if not beyond:
        eqx.save(path, [1.0], metadata={"text": text})
        assert eqx.load_metadata(path) == {"text": text}
        assert eqx.load(path, [0.0]) == [1.0]
        return
    with pytest.raises(ValueError, match=r"100,000,056 bytes, and .* 100,000,000\. It"):
        eqx.save(path, [1.0], metadata={"text": text})
    assert path.read_bytes() == before


ODD_DTYPES = [
    *sorted(set(np.sctypeDict.values()) - {np.object_}, key=str),
    *(getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e5m2", "int4")),
    [("a", "f4"), ("b", "i1", (2,))],
    [("a", ml_dtypes.bfloat16)],
    [("float8_e5m2", "V1")],
    [("nested", [("a", ml_dtypes.int4)])],
    [(f"field{i}", "f4") for i in range(300)],
    [(f"field{i}", "f4") for i in range(450)],
    [("ü€", "f4")],
    [("x" * 9000, "f4")],
    {"names": ["a"], "formats": ["f4"], "titles": ["title"]},
    (np.record, [("a", "f4")]),
    "M8[3D]",
    "S0",
    "V3",
    np.dtypes.StringDType(),
    jax.dtypes.float0,
]


@formats
@pytest.mark.filterwarnings("ignore:Stored array in format:UserWarning")
@pytest.mark.parametrize("number", range(len(ODD_DTYPES)))
def test_dtypes_are_kept_or_refused(tmp_path, suffix, number):
    for shape in (), (3,), (40, 1000), (0, 2):
        array = np.zeros(shape, ODD_DTYPES[number])
        saves_all_or_keeps(tmp_path, suffix, {"x": array})
        saves_all_or_keeps(tmp_path, suffix, {"x": array.T[..., None][::-1]})


@formats
def test_bool_that_is_another_byte_is_saved_as_true(tmp_path, suffix):
    tree = [np.array([0, 1, 2, 255], np.uint8).view(bool), np.uint8(2).view(bool)]
    save, load = BY_PATH[suffix]
    save(tmp_path / f"m{suffix}", tree)
    flags, flag = load(tmp_path / f"m{suffix}", [jnp.zeros(4, bool), np.bool_(0)])
    assert flags.view(np.uint8).tolist() == [0, 1, 1, 1] and flag


def to_file(tree):
    eqx.save(io.BytesIO(), tree)


def to_records(tree):
    eqx.tree_serialise_leaves(io.BytesIO(), tree)


def deleted(array):
    array.delete()
    return array


WITHOUT_VALUES = {
    "struct": lambda: jax.ShapeDtypeStruct((2,), "float32"),
    "empty struct": lambda: jax.ShapeDtypeStruct((0,), "float32"),
    "struct of keys": lambda: jax.eval_shape(lambda: jax.random.key(0)),
    "deleted": lambda: deleted(jnp.ones(2)),
    "deleted key": lambda: deleted(jax.random.key(0)),
    "ref": lambda: jax.new_ref(jnp.ones(2)),
    "masked": lambda: np.ma.masked_array([1.0], [True]),
    "objects": lambda: np.array([None]),
    "integer": lambda: 10**5000,
}


@pytest.mark.parametrize("write", [to_file, to_records, orbax.Save])
@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_leaf_without_values_is_refused_by_its_path(write, kind):
    with pytest.raises(eqx.LeafError, match=r"\['a'\]\[1\]") as caught:
        write({"a": [jnp.ones(1), WITHOUT_VALUES[kind]()]})
    assert jtu.keystr(caught.value.path) == "['a'][1]"


@pytest.mark.parametrize("write", [to_file, to_records, orbax.Save])
@pytest.mark.parametrize("make", [lambda: jnp.ones(1), lambda: jax.random.key(0)])
def test_traced_leaf_is_refused_by_its_path(write, make):
    @jax.jit
    def f():
        write({"a": [1, jax.lax.optimization_barrier(make())]})

    with pytest.raises(eqx.LeafError, match=r"\['a'\]\[1\].*traced"):
        f()


def test_state_dict_of_a_template_has_structs_and_no_ref():
    tree = {"x": jnp.ones(2), "key": jax.random.key(0)}
    structs = eqx.state_dict(eqx.filter_eval_shape(lambda: tree))
    assert {name: (x.shape, x.dtype) for name, x in structs.items()} == {
        name: (x.shape, x.dtype) for name, x in eqx.state_dict(tree).items()
    }
    with pytest.raises(eqx.LeafError, match=r"`key` is of type ShapeDtypeStruct"):
        eqx.load_state_dict(tree, structs)
    with pytest.raises(eqx.LeafError, match=r"`tree\['r'\]` is a `jax.Ref`") as caught:
        eqx.state_dict({"r": jax.new_ref(jnp.ones(2))})
    assert jtu.keystr(caught.value.path) == "['r']"


# A stream that `save` shares with something else.


@pytest.mark.parametrize("behind", [b"\n", b"the end", "a tree"])
@pytest.mark.parametrize("tree", [{"x": jnp.ones(2), "n": 3}, {}])
def test_stream_of_save_has_nothing_behind_the_tree(tmp_path, behind, tree):
    file = io.BytesIO()
    eqx.save(file, tree)
    if behind == "a tree":
        second = io.BytesIO()
        eqx.save(second, tree)
        behind = second.getvalue()
    file.write(behind)
    (tmp_path / "m.safetensors").write_bytes(file.getvalue())
    for read in (lambda f: eqx.load(f, tree), eqx.load_metadata):
        for source in file, tmp_path / "m.safetensors":
            file.seek(0)
            with pytest.raises(
                RuntimeError,
                match=rf" {len(behind)} bytes follow the tree.* rest of .*`{{'a': a, 'b'",
            ):
                read(source)


# Files of another kind


@formats
@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_compressed_file_is_answered_by_what_opens_it(tmp_path, suffix, module):
    save, load = BY_PATH[suffix]
    tree, path = {"w": jnp.arange(3.0), "n": 3}, tmp_path / f"m{suffix}"
    save(path, tree)
    path.write_bytes(module.compress(path.read_bytes()))
    with path.open("rb") as opened:
        for source in str(path), opened:
            with pytest.raises(RuntimeError, match="is compressed: pass `") as error:
                load(source, tree)
    code = str(error.value).split("pass `")[1].partition("`")[0]
    with eval(code, {module.__name__: module, "path": path}) as file:
        assert eqx.tree_equal(load(file, tree), tree)


@formats
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{\n  "architectures": ["GPT2"]}', "is a text in JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull`"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (pickle.dumps({"w": 1}), "is a zip archive or a pickle: .*`torch.load`"),
        (b"PK\x03\x04" + bytes(100), "is a zip archive or a pickle: .*`torch.load`"),
    ],
)
def test_file_of_another_kind_is_named(tmp_path, suffix, content, text):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=text):
        BY_PATH[suffix][1](path, {"w": jnp.ones(2)})


@formats
def test_file_of_the_other_format_is_answered_by_what_loads_it(tmp_path, suffix):
    (other,) = set(BY_PATH) - {suffix}
    tree, path = {"w": jnp.ones(2)}, tmp_path / "m"
    BY_PATH[other][0](f"{path}{other}", tree)
    name = BY_PATH[other][1].__name__
    with pytest.raises(RuntimeError, match=f"which `{name}` loads|`{name}` reads"):
        BY_PATH[suffix][1](f"{path}{other}", tree)


def test_empty_file_needs_no_seek_unless_it_is_open(tmp_path):
    (tmp_path / "m").with_suffix(".safetensors").touch()
    with pytest.raises(RuntimeError, match=r"It is empty\.$"):
        eqx.load(tmp_path / "m", {})
    file = io.BytesIO()
    eqx.save(file, {})
    with pytest.raises(
        RuntimeError, match=r"An open file may need `file\.seek\(0\)` first\.$"
    ):
        eqx.load(file, {})


# Streams that are cut or damaged


@given(data=st.data())
def test_cut_stream_says_so(data):
    file = io.BytesIO()
    eqx.save(file, {"x": jnp.ones(20), "n": 3})
    content = file.getvalue()
    start = 8 + int.from_bytes(content[:8], "little")
    size = data.draw(st.integers(start, len(content) - 1))
    match = rf"The file is cut: its last {len(content) - size} bytes are missing"
    with pytest.raises(RuntimeError, match=match):
        eqx.load_metadata(io.BytesIO(content[:size]))


# Dtypes of other programs, and forged ones.


def foreign(path, dtype, shape, data):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    text = json.dumps({"['x']": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("BOOL", "bool"),
        *((f"{kind}{n}", f"{name}{n}") for kind, name in (("I", "int"), ("U", "uint"))
          for n in (8, 16, 32)),
        ("F16", "float16"),
        ("BF16", "bfloat16"),
        ("F32", "float32"),
        ("C64", "complex64"),
        ("F8_E4M3", "float8_e4m3fn"),
        ("F8_E5M2", "float8_e5m2"),
        ("F8_E4M3FNUZ", "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", "float8_e5m2fnuz"),
        ("F8_E8M0", "float8_e8m0fnu"),
    ],
)  # fmt: skip
def test_dtypes_of_other_programs_are_read(tmp_path, theirs, ours, is_numpy):
    array = np.asarray([[1, 2, 4], [1, 1, 2]], jnp.dtype(ours))
    path = foreign(tmp_path / "m.safetensors", theirs, [2, 3], array.tobytes())
    like = np.zeros_like(array) if is_numpy else jnp.zeros(array.shape, array.dtype)
    again = eqx.load(path, {"x": like})["x"]
    assert same(again, array if is_numpy else jnp.asarray(array))
    with pytest.raises(eqx.LeafError, match=rf"`\['x'\]` is {ours}\[2,3\] in the file"):
        eqx.load(path, {"x": jnp.zeros((2, 3), jnp.uint4)})


def test_two_floats_of_four_bits_in_a_byte_are_read(tmp_path):
    # As in PyTorch: the first one is in the lower half of the byte.
    path = foreign(tmp_path / "m.safetensors", "F4", [2, 2], bytes([0x21, 0xF7]))
    again = eqx.load(path, {"x": jnp.zeros((2, 2), jnp.float4_e2m1fn)})["x"]
    assert again.astype(float).tolist() == [[0.5, 1.0], [6.0, -6.0]]


@pytest.mark.parametrize("theirs", ["F6_E2M3", "F6_E3M2"])
def test_dtype_that_cannot_be_read_is_named_beside_the_tensor(tmp_path, theirs):
    path = foreign(tmp_path / "m.safetensors", theirs, [4], bytes(3))
    match = rf"`\['x'\]` is {theirs}\[4\] .*; `load` does not know this dtype$"
    with pytest.raises(eqx.LeafError, match=match):
        eqx.load(path, {"x": jnp.zeros(4)})


@pytest.mark.parametrize(
    "dtype", ["__builtins__", "__doc__", "finfo", "np", "object", "f4,f4", "V4"]
)
def test_dtype_of_a_file_is_one_of_a_list(tmp_path, dtype):
    data = np.zeros(8, np.uint8)
    head = header_of({}, [("['x']", Tensor("U8", (2, 4), {"dtype": dtype}), data)])
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + data.tobytes())
    for load in (
        lambda: eqx.load(path, {"x": jnp.zeros(2)}),
        lambda: eqx.load(path, {}),
    ):
        with pytest.raises(eqx.LeafError, match=r"`\['x'\]`"):
            load()


forged = st.one_of(
    st.sampled_from(sorted({*dir(ml_dtypes), *dir(np), *dir(jnp)})),
    st.sampled_from(dir(ml_dtypes)),
    st.sampled_from(
        ["U8", "F4", "O", "object", "V4", "f4,f4", "(2,)f4", "S", "key<fry>"]
    ),
    texts,
)
words = st.sampled_from(["dtype", "key", "python", "weak_type", "jax", "sum"])


@given(
    kind=st.dictionaries(words | texts, forged | st.just("true"), max_size=3),
    shape=st.sampled_from([(), (2,), (2, 4), (2, 2), (0,)]),
    stored=st.sampled_from(["U8", "F32", "U32", "BOOL"]),
    like=st.sampled_from(
        [
            1.5,
            True,
            np.zeros(2),
            jnp.zeros((2, 2)),
            jnp.zeros(2, bool),
            jax.random.key(0),
        ]
    ),
    verify=st.booleans(),
)
def test_forged_description_ends_well(
    tmp_path_factory, kind, shape, stored, like, verify
):
    size = 4 if "32" in stored else 1
    data = np.zeros(size * int(np.prod(shape)), np.uint8)
    head = header_of({}, [("['x']", Tensor(stored, shape, kind), data)])
    path = tmp_path_factory.mktemp("forged") / "m.safetensors"
    path.write_bytes(head + data.tobytes())
    try:
        again = eqx.load(path, {"x": like}, verify=verify)["x"]
    except RuntimeError as error:
        assert len(str(error)) > 20
    else:
        assert type(again) is type(like)
        assert not eqx.is_array(like) or (again.dtype, again.shape) == (
            like.dtype,
            like.shape,
        )
