"""An index of several files: what `save` writes to it, what `load` and `load_state_dict`
read from it, and from those of other programs."""

import json
import os

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from strategies import same, whole_trees

import equinox_like as eqx

INDEX = "model.safetensors.index.json"
TREE = {
    "a": jnp.arange(6.0).reshape(2, 3),
    "b": jnp.ones(5, jnp.bfloat16),
    "key": jax.random.key(1),
    "big": np.arange(100.0),
    "n": 3,
}
OTHER = {**TREE, "a": -TREE["a"], "n": 4}
NAMES = sorted(f"['{name}']" for name in TREE)


def write_index(folder, parts, table=None, **fields):
    """An index as other programs write it, with a file for each of `parts`."""
    for file, part in parts.items():
        safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
    if table is None:
        table = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 20}, "weight_map": table, **fields}
    (folder / INDEX).write_text(json.dumps(index))
    return folder / INDEX


PARTS = {
    "model-00001-of-00002.safetensors": {"w": np.arange(2, dtype="f4")},
    "model-00002-of-00002.safetensors": {"b": np.ones(3, "f4")},
}
LIKE = {"w": jnp.zeros(2), "b": jnp.zeros(3)}


class Pair(eqx.Module):
    w: jax.Array
    b: jax.Array


PAIR = Pair(**LIKE)
FIRST, SECOND = PARTS


# What is saved


@given(whole_trees(), st.integers(1, 100))
def test_every_tree_comes_back_from_files_of_any_size(tmp_path_factory, tree, size):
    folder = tmp_path_factory.mktemp("saved")
    eqx.save(folder / "model", tree, max_shard_size=size)
    again = eqx.load(folder / INDEX, tree)
    assert jtu.tree_structure(again) == jtu.tree_structure(tree)
    assert all(map(same, jtu.tree_leaves(tree), jtu.tree_leaves(again)))


@pytest.mark.parametrize("size", [1, 64, 100, 900, 10**9])
def test_files_have_the_tensors_of_the_single_file_up_to_the_size(tmp_path, size):
    eqx.save(tmp_path / "single", TREE)
    eqx.save(tmp_path / "model", TREE, max_shard_size=size)
    index = json.loads((tmp_path / INDEX).read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = safetensors.numpy.load_file(tmp_path / file)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= size
        assert {index["weight_map"][name] for name in tensors} == {file}
        found |= tensors
    single = safetensors.numpy.load_file(tmp_path / "single.safetensors")
    assert found.keys() == single.keys() == index["weight_map"].keys()
    assert all(same(found[name], single[name]) for name in single)
    total = sum(x.nbytes for x in single.values())
    assert index["metadata"] == {"total_size": total}


def test_files_have_the_names_that_other_programs_give_them(tmp_path):
    eqx.save(tmp_path / "model", TREE, max_shard_size=100)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        INDEX,
    ]


@pytest.mark.parametrize("name", ["model", "model.safetensors", INDEX])
@pytest.mark.parametrize("kind", [str, os.fsencode, os.fspath])
def test_path_is_that_of_the_index_or_of_a_single_file(tmp_path, name, kind):
    path = kind(str(tmp_path / name))
    eqx.save(path, TREE, {"step": "1"}, max_shard_size=100)
    assert (tmp_path / INDEX).exists()
    for other in ("model", "model.safetensors", INDEX):
        assert eqx.tree_equal(eqx.load(tmp_path / other, TREE), TREE)
    assert eqx.load_metadata(path) == {"step": "1"}


def test_metadata_are_in_each_file_too(tmp_path):
    eqx.save(tmp_path / "model", TREE, {"format": "pt"}, max_shard_size=100)
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "numpy") as opened:
            assert opened.metadata()["format"] == "pt"


def test_saved_arrays_stay_as_they_are(tmp_path):
    eqx.save(tmp_path / "model", TREE, max_shard_size=10)
    assert not any(x.is_deleted() for x in (TREE["a"], TREE["b"], TREE["key"]))


# What is replaced


def test_new_index_replaces_the_old_one_and_its_files_only(tmp_path):
    kept = ["model-00009-of-00009.safetensors", "other-00001-of-00003.safetensors"]
    for name in kept:
        (tmp_path / name).touch()
    for tree, size in (TREE, 100), (OTHER, 100), (TREE, 1), (OTHER, 10**6):
        eqx.save(tmp_path / "model", tree, max_shard_size=size)
        assert eqx.tree_equal(eqx.load(tmp_path / INDEX, TREE), tree)
        table = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        there = {x.name for x in tmp_path.iterdir()}
        assert there == {*kept, INDEX, *table.values()}


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("is_new", [False, True])
def test_error_at_any_step_leaves_the_old_index_with_its_files(
    tmp_path, monkeypatch, step, is_new
):
    if not is_new:
        eqx.save(tmp_path / "model", TREE, max_shard_size=100)
    before = {x.name: x.read_bytes() for x in tmp_path.iterdir()}
    replace, calls = os.replace, iter(range(100))

    def failing(*args):
        if next(calls) == step:
            raise OSError(28, "No space left on device")
        replace(*args)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="No space"):
        eqx.save(tmp_path / "model", OTHER, max_shard_size=100)
    assert {x.name: x.read_bytes() for x in tmp_path.iterdir()} == before


def test_index_that_cannot_be_read_is_replaced_and_nothing_deleted(tmp_path):
    (tmp_path / INDEX).write_text("{")
    (tmp_path / FIRST).touch()
    eqx.save(tmp_path / "model", TREE, max_shard_size=100)
    assert eqx.tree_equal(eqx.load(tmp_path / INDEX, TREE), TREE)
    assert (tmp_path / FIRST).read_bytes() == b""


def test_files_of_an_index_with_other_names_are_not_deleted(tmp_path):
    write_index(
        tmp_path, {"model.txt": PARTS[FIRST], "base.safetensors": PARTS[SECOND]}
    )
    eqx.save(tmp_path / "model", TREE, max_shard_size=10**6)
    assert (tmp_path / "model.txt").exists() and (
        tmp_path / "base.safetensors"
    ).exists()


def test_index_beside_a_single_file_is_refused(tmp_path):
    eqx.save(tmp_path / "model", TREE)
    for name in ("model", INDEX):
        with pytest.raises(FileExistsError, match="not the index beside it: remove"):
            eqx.save(tmp_path / name, OTHER, max_shard_size=100)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("size", ["5GB", 0, -1, 1.5, True])
def test_size_must_be_a_number_of_bytes(tmp_path, size):
    with pytest.raises(ValueError, match=r"a number of bytes, such as `5 \* 10\*\*9`"):
        eqx.save(tmp_path / "model", TREE, max_shard_size=size)
    assert os.listdir(tmp_path) == []


def test_index_needs_a_path_and_a_size(tmp_path):
    with open(tmp_path / "model", "wb") as file:
        with pytest.raises(ValueError, match="and needs a path"):
            eqx.save(file, TREE, max_shard_size=100)
    with pytest.raises(ValueError, match=r"ends with `\.index\.json` needs `max_shard"):
        eqx.save(tmp_path / INDEX, TREE)
    assert os.listdir(tmp_path) == ["model"]


# What is read


@pytest.mark.parametrize("kind", [str, os.fsencode, os.fspath])
def test_files_of_other_programs_are_read(tmp_path, kind):
    path = kind(str(write_index(tmp_path, PARTS)))
    rename = lambda path: path[2:-2]  # noqa: E731
    loaded = eqx.load(path, LIKE, rename=rename)
    assert loaded["w"].tolist() == [0, 1] and loaded["b"].tolist() == [1, 1, 1]
    assert eqx.tree_equal(eqx.load_state_dict(LIKE, path), loaded)
    assert eqx.load_metadata(path) == {}
    part = eqx.load(path, {"w": LIKE["w"]}, rename=rename, strict=False)
    assert eqx.tree_equal(part, {"w": loaded["w"]})


def test_state_dict_of_a_single_file_is_read_by_its_path(tmp_path):
    arrays = {"w": np.ones(2, "f4"), "b": np.asarray([1, 2, 3], jnp.bfloat16)}
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    like = {"w": jnp.zeros(2), "b": jnp.zeros(3, jnp.bfloat16)}
    for path in (tmp_path / "m", str(tmp_path / "m.safetensors")):
        loaded = eqx.load_state_dict(like, path)
        assert loaded["w"].tolist() == [1, 1] and loaded["b"].tolist() == [1, 2, 3]
    with pytest.raises(eqx.LeafError, match="only in the mapping: `b`"):
        eqx.load_state_dict({"w": like["w"]}, tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        eqx.load_state_dict(like, tmp_path / "missing")


class Flat(eqx.Module):
    key: jax.Array
    x: jax.Array
    z: np.ndarray
    n: int


def test_state_dict_reads_what_save_wrote(tmp_path):
    tree = Flat(jax.random.key(3), jnp.ones(2, jnp.int4), np.ones(2) * 1j, 5)
    like = Flat(jax.random.key(0), jnp.zeros(2, jnp.int4), np.zeros(2) * 1j, 0)
    for size in (None, 1):
        eqx.save(tmp_path / f"m{size}", tree, max_shard_size=size)
        assert eqx.tree_equal(eqx.load_state_dict(like, tmp_path / f"m{size}"), tree)


def test_damaged_data_are_refused_by_load_and_by_load_state_dict(tmp_path):
    eqx.save(tmp_path / "model", PAIR, max_shard_size=1)
    file = tmp_path / SECOND
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(eqx.LeafError, match="`b` is damaged"):
        eqx.load(tmp_path / INDEX, PAIR)
    with pytest.raises(RuntimeError, match=rf"`b`, .*, is damaged .*{INDEX}"):
        eqx.load_state_dict(PAIR, tmp_path / INDEX)


def test_unknown_dtype_is_named_by_load_state_dict(tmp_path):
    head = b'{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(3))
    with pytest.raises(
        RuntimeError, match=r"`w`, F6_E2M3\[4\], is .* of an unknown dtype"
    ):
        eqx.load_state_dict({"w": jnp.zeros(1)}, path)


def test_missing_file_is_named(tmp_path):
    index = write_index(tmp_path, PARTS)
    (tmp_path / SECOND).unlink()
    for read in (
        lambda: eqx.load(index, LIKE),
        lambda: eqx.load_state_dict(LIKE, index),
    ):
        with pytest.raises(FileNotFoundError) as error:
            read()
        assert error.value.filename == str(tmp_path / SECOND)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"w": FIRST, "b": FIRST}, rf"{FIRST} does not have 'b', contrary to"),
        ({"w": FIRST, "b": SECOND, "c": SECOND}, rf"{SECOND} does not have 'c'"),
    ],
)
def test_index_must_agree_with_its_files(tmp_path, table, text):
    index = write_index(tmp_path, PARTS, table)
    with pytest.raises(RuntimeError, match=text):
        eqx.load(index, LIKE, strict=False)


@pytest.mark.parametrize("extra", ["w", "c"])
def test_tensor_that_the_index_does_not_have_there_is_refused(tmp_path, extra):
    parts = {FIRST: PARTS[FIRST], SECOND: PARTS[SECOND] | {extra: np.zeros(2, "f4")}}
    index = write_index(tmp_path, parts, {"w": FIRST, "b": SECOND})
    for strict in (False, True):
        with pytest.raises(RuntimeError, match=f"{SECOND} has '{extra}', contrary to"):
            eqx.load_state_dict(LIKE, index, strict=strict)


OUTSIDE = [
    "../model.safetensors",
    "/model.safetensors",
    "a/b.safetensors",
    "..",
    ".",
    "",
]


@pytest.mark.parametrize("name", [*OUTSIDE, "..\\m", "C:m", "a\0b", 3, None, ["m"]])
def test_files_outside_of_the_folder_are_refused(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    safetensors.numpy.save_file(PARTS[FIRST], tmp_path / "model.safetensors")
    index = write_index(folder, {}, {"w": name})
    with pytest.raises(RuntimeError, match=r"not in its folder|not an index"):
        eqx.load(index, LIKE)
    eqx.save(folder / "model", TREE, max_shard_size=10**6)
    assert (tmp_path / "model.safetensors").exists()


def test_link_to_a_file_elsewhere_is_followed(tmp_path):
    """The cache of Hugging Face has such links."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    write_index(tmp_path, PARTS)
    for name in (FIRST, SECOND, INDEX):
        (folder / name).symlink_to(tmp_path / name)
    assert eqx.load_state_dict(LIKE, folder / INDEX)["w"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "It is empty"),
        ("{", "is a text|has no complete table `weight_map`"),
        ("[]", "has no complete table `weight_map`"),
        ('{"weight_map": 3}', "has no complete table"),
        ('{"weight_map": {"w": 3}}', "has no complete table"),
        ('{"weight_map": {}, "metadata": 3}', "has no complete table"),
        ("[" * 100_000, "has no complete table"),
        ("version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull`"),
        ("<!DOCTYPE html><html>", "is a web page"),
        ("\ud800", "has no complete table"),
    ],
)
def test_file_that_is_not_an_index_says_what_it_is(tmp_path, content, text):
    (tmp_path / INDEX).write_text(content, errors="surrogatepass")
    for read in (lambda f: eqx.load(f, LIKE), eqx.load_metadata):
        with pytest.raises(RuntimeError, match=rf"not an index of safetensors.*{text}"):
            read(tmp_path / INDEX)


def test_index_without_metadata_is_read(tmp_path):
    for about in ({}, None, {"total_size": 1, "note": "x"}):
        index = write_index(tmp_path, PARTS, metadata=about)
        assert eqx.load_metadata(index) == ({"note": "x"} if about else {})
        assert eqx.load_state_dict(LIKE, index)["w"].tolist() == [0, 1]


def test_single_file_is_read_where_there_are_both(tmp_path):
    write_index(tmp_path, PARTS)
    eqx.save(tmp_path / "model", PAIR)
    assert not eqx.load(tmp_path / "model", PAIR).b.any()
    assert eqx.load(tmp_path / INDEX, PAIR).b.all()


def test_index_under_another_name_or_open_says_what_reads_it(tmp_path):
    index = write_index(tmp_path, PARTS)
    other = index.rename(tmp_path / "index.txt")
    text = r"is the index of a model in several files, .* must end with `\.index\.json`"
    with pytest.raises(RuntimeError, match=text):
        eqx.load(other, LIKE)
    with open(other, "rb") as file, pytest.raises(RuntimeError, match=text):
        eqx.load_metadata(file)


@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_of_an_index_are_placed_as_those_of_the_template(tmp_path, sharded):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    where = jax.NamedSharding(mesh, jax.P("x" if sharded else None))
    tree = jax.device_put({"w": jnp.arange(4.0), "b": jnp.ones(2)}, where)
    eqx.save(tmp_path / "model", tree, max_shard_size=1)
    loaded = eqx.load(tmp_path / INDEX, tree)
    assert eqx.tree_equal(loaded, tree) and loaded["w"].sharding == where
