"""Any tree in the checkpoints of Orbax: what is saved comes back, or an error says why."""

import asyncio
import gc
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import processes_orbax
import pytest
from hypothesis import given
from jax.sharding import AxisType, PartitionSpec as P
from processes import run_together, start
from strategies import ARRAYS, OWN_PRNG, same

import equinox_like as eqx
from equinox_like import nn, orbax
from equinox_like._io import checksums, orbax_trees

HERE = Path(__file__).parent
MESH = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        yield manager


def round_trip(manager, tree, like=None, **options):
    manager.save(1, args=orbax.Save(tree))
    manager.wait_until_finished()
    like = tree if like is None else like
    return manager.restore(1, args=orbax.Restore(like, **options))


class Net(eqx.Module):
    linear: nn.Linear
    norm: nn.BatchNorm
    key: jax.Array
    activation: object = jax.nn.relu
    rate: object = 0.1

    def __init__(self, key, activation=jax.nn.relu):
        self.linear = nn.Linear(4, 4, key=key)
        self.norm = nn.BatchNorm(4, "batch", mode="batch")
        self.key = jax.random.split(key, 2)
        self.activation = activation


def test_a_model_its_state_and_that_of_an_optimiser_come_back(manager, key):
    model, state = nn.make_with_state(Net)(key)
    optimiser = optax.adam(1e-3).init(eqx.filter(model, eqx.trainable))
    tree = model, state, optimiser
    like = eqx.filter_eval_shape(lambda: tree)
    again = round_trip(manager, tree, like)
    assert eqx.tree_equal(again, tree)
    assert again[0].key.dtype == model.key.dtype


def test_leaves_of_all_kinds_come_back(manager):
    tree = {
        "arrays": list(ARRAYS),
        "numbers": [True, 3, 2.5, 1 + 2j, float("inf")],
        "numpy": [np.float64(0.1), np.array(0.1), np.arange(3, dtype=">i4")[::2]],
        "a/b 'c'": [jnp.ones(2), {"..": jnp.zeros(1)}],
        "others": [None, "text", len],
        "keys": [jax.random.key(1, impl=impl) for impl in ("rbg", OWN_PRNG)],
        "none": jnp.zeros((0, 2)),
    }
    again = round_trip(manager, tree)
    big = tree["numpy"].pop(), again["numpy"].pop()
    assert big[0].tolist() == big[1].tolist()
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(map(same, *map(jax.tree.leaves, (again, tree))))


def test_weak_dtypes_come_back(manager):
    tree = {"weak": jnp.array(0.5), "strong": jnp.array(0.5, jnp.float32)}
    again = round_trip(manager, tree, {"weak": tree["strong"], "strong": tree["weak"]})
    assert eqx.tree_equal(again, tree, check_weak_type=True)
    assert again["weak"].weak_type


@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "c16"])
def test_template_of_structs_has_what_jax_makes_of_numpy(manager, dtype):
    def make():
        return {"a": np.arange(6).astype(dtype).reshape(2, 3), "b": jnp.ones(2)}

    again = round_trip(manager, make(), eqx.filter_eval_shape(make))
    assert same(again["a"], jnp.asarray(make()["a"])) and same(again["b"], jnp.ones(2))


def test_narrowed_array_is_put_where_it_is_wanted(manager):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    like = [jax.ShapeDtypeStruct((3,), jnp.int32, sharding=sharding)]
    (again,) = round_trip(manager, [np.arange(3)], like)
    assert again.tolist() == [0, 1, 2] and again.sharding == sharding


def test_integer_that_would_change_is_refused_by_its_path(manager):
    like = {"a": jax.ShapeDtypeStruct((1,), jnp.int32)}
    with pytest.raises(eqx.LeafError, match=r"`\['a'\]` has integers .* int32 cannot"):
        round_trip(manager, {"a": np.array([2**31])}, like)


def test_jax_array_of_64_bits_is_not_narrowed(manager):
    with jax.enable_x64(True):
        saved = [jnp.ones(2, float)]
        assert same(
            round_trip(manager, saved, eqx.filter_eval_shape(lambda: saved)), saved
        )
    like = [jax.ShapeDtypeStruct((2,), jnp.float32)]
    with pytest.raises(eqx.LeafError, match=r"is float64\[2\] in the checkpoint, but"):
        manager.restore(1, args=orbax.Restore(like))


@pytest.mark.parametrize("shape", [(1,), (0,)])
def test_struct_of_a_dtype_that_jax_lacks_is_refused(manager, shape):
    like = {"a": jax.ShapeDtypeStruct(shape, "int64")}
    with pytest.raises(eqx.LeafError, match=r"`\['a'\]` has the dtype int64"):
        round_trip(manager, {"a": np.full(shape, 2**40)}, like)


def test_a_tree_without_arrays_comes_back(manager):
    assert round_trip(manager, {"rate": 0.5}, {"rate": 0.0}) == {"rate": 0.5}


def test_saving_is_asynchronous_and_keeps_the_values_of_its_call(manager, key):
    tree = {"jax": jax.random.normal(key, (256, 256)), "numpy": np.ones((256, 256))}
    expected = jax.tree.map(np.array, tree)
    manager.save(1, args=orbax.Save(tree))
    eqx.filter_jit(lambda t: jax.tree.map(jnp.zeros_like, t), donate="all")(tree["jax"])
    tree["numpy"][:] = 0
    manager.wait_until_finished()
    like = eqx.filter_eval_shape(lambda: jax.tree.map(jnp.asarray, expected))
    like["numpy"] = expected["numpy"]
    again = manager.restore(1, args=orbax.Restore(like))
    assert all((again[name] == expected[name]).all() for name in tree)


def test_it_is_restored_onto_another_mesh(manager, key):
    auto = {"axis_types": (AxisType.Auto,)}
    rules = [("**.linear.weight", P("x")), ("**", P())]
    before = jax.make_mesh((4,), ("x",), **auto)
    after = jax.make_mesh((2,), ("x",), devices=jax.devices()[2:], **auto)
    model, _ = eqx.Layout(before, rules).init(nn.make_with_state(Net), key)
    like = eqx.filter_eval_shape(lambda: model)
    again = round_trip(
        manager, model, like, shardings=eqx.Layout(after, rules).shardings(like)
    )
    assert again.linear.weight.sharding.mesh == after
    assert again.linear.weight.addressable_shards[0].data.shape == (2, 4)
    assert again.key.sharding.device_set == set(jax.devices()[2:])
    assert eqx.tree_equal(again, model)
    assert round_trip(manager, model).linear.weight.sharding.mesh == before


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_are_on_no_mesh_are_restored_beside_those_that_are(
    manager, axis_type
):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    sharded = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("x")))
    tree = {"sharded": sharded, "free": jnp.ones(()), "key": jax.random.key(0)}
    with jax.set_mesh(mesh):
        again = round_trip(manager, tree)
    assert not again["free"].committed and not again["key"].committed
    assert jax.jit(lambda x: x["sharded"].sum() + x["free"])(again) == 29


def test_arrays_of_a_template_go_to_the_mesh_in_use(manager):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    where = jax.NamedSharding(mesh, P("x"))
    tree = {"x": jax.device_put(jnp.arange(8.0), where)}
    like = eqx.filter_eval_shape(lambda: tree)
    with pytest.raises(eqx.LeafError, match=r"`\['x'\]` .* `jax.set_mesh\(mesh\)`"):
        round_trip(manager, tree, like)
    with jax.set_mesh(mesh):
        again = manager.restore(1, args=orbax.Restore(like))
    assert again["x"].sharding == where and eqx.tree_equal(again, tree)


def test_a_part_is_restored_by_pattern(manager, key):
    model = nn.MLP(2, 2, 4, 2, key=key)
    other = nn.MLP(2, 2, 4, 2, key=jax.random.key(1))
    new = round_trip(manager, model, other, at=["layers[0]", "**.bias"])
    assert eqx.tree_equal(new.layers[0], model.layers[0])
    assert (new.layers[1].bias == model.layers[1].bias).all()
    assert new.layers[1].weight is other.layers[1].weight
    patterns = (pattern for pattern in ["layers[0]", "**.bias"])
    again = manager.restore(1, args=orbax.Restore(other, at=patterns))
    assert eqx.tree_equal(again, new)
    with pytest.raises(ValueError, match=r"The pattern 'layer\[0\]' matches no leaf"):
        manager.restore(1, args=orbax.Restore(other, at="layer[0]"))
    like = eqx.filter_eval_shape(lambda: other)
    with pytest.raises(
        eqx.LeafError,
        match=r"`at` does not match `layers\[1\]\.weight`, and `like` has a ShapeDtype",
    ):
        manager.restore(1, args=orbax.Restore(like, at="layers[0]"))


def test_a_part_of_a_dictionary_is_restored_by_its_key_as_paths_write_it(manager):
    tree, like = (
        {"model": [jnp.ones(2)], "step": 3},
        {"model": [jnp.zeros(2)], "step": 0},
    )
    new = round_trip(manager, tree, like, at="['model']")
    assert eqx.tree_equal(new, tree | {"step": 0})
    with pytest.raises(
        ValueError, match=r"leaves are `\['model'\]\[0\]`, `\['step'\]`\."
    ):
        manager.restore(1, args=orbax.Restore(like, at="model"))


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: orbax.Save(nn.Linear), TypeError, "`tree` is the class `Linear`"),
        (lambda: orbax.Save(len), TypeError, "`tree` is the function `len`"),
        (lambda: orbax.Restore(nn.Linear), TypeError, "`like` is the class `Linear`"),
        (lambda: orbax.Restore({}, at=3), TypeError, "`at` takes patterns .* got 3"),
        (lambda: orbax.Restore({}, at=[]), ValueError, "`at` must have a pattern"),
    ],
)
def test_wrong_argument_is_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.usefixtures("without_type_checks")
def test_saving_and_restoring_each_take_their_own_arguments(tmp_path):
    handler = orbax.TreeHandler()
    with pytest.raises(
        TypeError, match=r"`save` takes `equinox_like\.orbax\.Save`; got"
    ):
        handler.save(tmp_path, orbax.Restore({}))
    with pytest.raises(TypeError, match="`save` takes"):
        asyncio.run(handler.async_save(tmp_path, orbax.Restore({})))
    with pytest.raises(TypeError, match=r"`restore` takes `equinox_like\.orbax\.Rest"):
        handler.restore(tmp_path, orbax.Save({}))
    handler.close()


def test_arrays_are_written_and_read_by_the_given_handler_which_is_closed(tmp_path):
    arrays = mock.Mock(wraps=ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(orbax.TreeHandler(arrays)) as checkpointer:
        checkpointer.save(tmp_path / "a", args=orbax.Save([jnp.ones(2)]))
        checkpointer.restore(tmp_path / "a", args=orbax.Restore([jnp.ones(2)]))
    called = {call[0] for call in arrays.method_calls}
    assert {"save", "restore", "close"} <= called


@pytest.mark.parametrize("more", [{}, {"step": 3}])
def test_item_of_a_saved_dictionary_is_answered_by_the_call(manager, key, more):
    model = nn.Linear(2, 2, key=key)
    with pytest.raises(eqx.LeafError) as caught:
        round_trip(manager, {"model": model} | more, model)
    *_, code, end = str(caught.value).split("`")
    assert code.count("...") == len(more) and end == "."
    names = {"eqx": eqx, "manager": manager, "step": 1, "like": model, "more": more}
    loaded = eval(code.replace("...", "**more"), names)
    assert eqx.tree_equal(loaded, model)


def test_all_differences_are_told_at_once(manager):
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "f": jax.nn.relu, "n": 1, "k": "x"}
    like = {"a": jnp.ones(3), "c": jnp.ones(2), "f": jnp.tanh, "n": 1.0, "k": "y"}
    with pytest.raises(eqx.LeafError) as caught:
        round_trip(manager, tree, like)
    for line in (
        "`['a']` is float32[2] in the checkpoint, but float32[3] in `like`",
        "`['f']` is relu in the checkpoint, but tanh in `like`",
        "`['n']` is a Python int in the checkpoint, but a Python float in `like`",
        "`['k']` is 'x' in the checkpoint, but 'y' in `like`",
        "missing in the checkpoint: `['c']`",
        "only in the checkpoint: `['b']`",
        "Pass `at` to restore a part.",
    ):
        assert line in str(caught.value)


def test_list_that_has_grown_is_answered_by_custom_metadata(manager):
    tree = {"model": jnp.ones(2), "history": [0.5, 0.25]}
    like = {"model": jnp.zeros(2), "history": []}
    manager.save(1, args=orbax.Save(tree))
    hint = r"If `\['history'\]` grows in .* `custom_metadata=` of Orbax"
    with pytest.raises(eqx.LeafError, match=hint):
        manager.restore(1, args=orbax.Restore(like))
    history = tree.pop("history")
    manager.save(2, args=orbax.Save(tree), custom_metadata={"history": history})
    manager.wait_until_finished()
    assert manager.metadata(2).custom_metadata == {"history": [0.5, 0.25]}


def test_what_cannot_be_saved_is_named():
    deleted = jnp.ones(2)
    deleted.delete()
    for leaf, problem in (
        (deleted, "was donated or deleted"),
        (np.array([None]), "of a dtype that Orbax does not store"),
        (jnp.zeros(2, jnp.uint4), "of a dtype that Orbax does not store"),
        (jax.ShapeDtypeStruct((2,), "float32"), "has no values to save"),
        (np.ma.masked_array([1.0], [True]), "would lose its mask"),
    ):
        with pytest.raises(eqx.LeafError, match=rf"`\['x'\]` .* {problem}"):
            orbax.Save({"x": leaf})


def test_a_checkpoint_of_another_kind_is_an_error(tmp_path):
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)}))
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        with pytest.raises(ValueError, match="was not saved by `equinox_like"):
            manager.restore(1, args=orbax.Restore({"x": jnp.ones(2)}))


def test_it_stands_beside_other_arguments(tmp_path, key):
    model = nn.Linear(2, 2, key=key)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        saved = ocp.args.Composite(
            model=orbax.Save(model), data=ocp.args.JsonSave({"epoch": 3})
        )
        manager.save(1, args=saved)
        manager.wait_until_finished()
        wanted = ocp.args.Composite(
            model=orbax.Restore(model), data=ocp.args.JsonRestore()
        )
        again = manager.restore(1, args=wanted)
    assert eqx.tree_equal(again.model, model) and again.data == {"epoch": 3}


@pytest.mark.parametrize("place", ["host", "device"])
def test_sums_are_computed_in_the_background(manager, key, place, monkeypatch):
    """Also if the arrays are donated or deleted meanwhile; the step waits for the sums."""
    monkeypatch.setattr(checksums, "_is_on_host", lambda x: place == "host")
    go_on = threading.Event()
    slow = mock.Mock(
        wraps=orbax_trees.sum_of_parts,
        side_effect=lambda parts: go_on.wait(60) and mock.DEFAULT,
    )
    monkeypatch.setattr(orbax_trees, "sum_of_parts", slow)
    split = jax.device_put(np.arange(64.0), jax.NamedSharding(MESH, P("x")))
    arrays = {"one": jax.random.normal(key, (64,)), "split": split}
    tree = arrays | {"numpy": np.arange(9)}
    expected = jax.tree.map(np.array, tree)
    like = jax.eval_shape(lambda: expected) | {"numpy": np.zeros(9, int)}
    manager.save(1, args=orbax.Save(tree))
    jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)(arrays)
    for x in arrays.values():
        x.delete()
    tree["numpy"][:] = 0
    assert not manager.all_steps(read=True)
    go_on.set()
    manager.wait_until_finished()
    again = manager.restore(1, args=orbax.Restore(like, jax.devices()[0]))
    assert all((again[name] == expected[name]).all() for name in expected)


def test_step_without_sums_is_not_finished(manager, monkeypatch):
    def fail(parts):
        raise MemoryError("no room for the sum")

    with monkeypatch.context() as patch:
        patch.setattr(orbax_trees, "sum_of_parts", fail)
        manager.save(1, args=orbax.Save([jnp.ones(2)]))
        with pytest.raises(MemoryError, match="no room"):
            manager.wait_until_finished()
    assert manager.all_steps(read=True) == []
    assert round_trip(manager, [jnp.ones(2)])[0].tolist() == [1, 1]


@pytest.mark.parametrize("stage", ["write_sums", "finalize"])
def test_a_save_that_is_killed_leaves_the_earlier_step(tmp_path, stage):
    process = start(HERE / "killed_save.py", tmp_path / "steps", stage, devices=1)
    assert process.stdout.readline().strip() == "written, not committed"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        assert manager.all_steps() == [1]
        again = manager.restore(1, args=orbax.Restore({"x": jnp.zeros(8)}))
        assert (again["x"] == 1).all()
        manager.save(2, args=orbax.Save({"x": 2 * again["x"]}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize(("savers", "others"), [(2, 4), (4, 2)])
def test_processes_save_and_restore_their_own_shards(tmp_path, savers, others):
    """And so does another number of processes, and one."""
    folder = tmp_path / "steps"
    for count, task in (savers, "save"), (others, "restore"):
        script = HERE / "processes_orbax.py"
        run = run_together(script, folder, task, processes=count, devices=4 // count)
        assert all("as saved" in printed for printed in run)
    processes_orbax.check_restored(folder)
    processes_orbax.check_damage_is_found(folder)


def test_without_orbax_the_error_says_what_to_install():
    code = "import sys; sys.modules['orbax'] = None; import equinox_like.orbax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install orbax-checkpoint" in done.stderr


# Damage


DAMAGED = {
    "big": jax.random.normal(jax.random.key(0), (50, 50)),
    "half": jnp.ones((4, 3), jnp.bfloat16),
    "host": np.arange(5),
    "key": jax.random.key(3),
    "name": "text",
    "rate": 0.25,
    "sharded": jax.device_put(jnp.arange(300.0), jax.NamedSharding(MESH, P("x"))),
    "step": 3,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a checkpoint, and the bytes of its files."""
    path = tmp_path_factory.mktemp("sound") / "checkpoint"
    with ocp.Checkpointer(orbax.TreeHandler()) as checkpointer:
        checkpointer.save(path, args=orbax.Save(DAMAGED))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return path, {file: file.read_bytes() for file in files}


@pytest.fixture(autouse=True)
def mend(request):
    yield
    if "sound" in request.fixturenames:
        restore_files(request.getfixturevalue("sound")[1])
        gc.collect()  # what Orbax left is for this test, which ignores it


def restore_files(files):
    for file, content in files.items():
        file.write_bytes(content)


def restored(path, like=DAMAGED, **options):
    with ocp.Checkpointer(orbax.TreeHandler()) as checkpointer:
        return checkpointer.restore(path, args=orbax.Restore(like, **options))


def ends_well(path):
    """Whether the error of a damaged checkpoint came; else all must be as saved."""
    try:
        again = restored(path)
    except eqx.LeafError as error:
        assert len(str(error)) > 20
        return True
    assert all(map(same, *map(jax.tree.leaves, (again, DAMAGED))))
    assert again["sharded"].sharding == DAMAGED["sharded"].sharding
    return False


# Orbax does not wait for the other arrays if one cannot be read.
ignored = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)


@ignored
@given(data=st.data())
def test_damaged_checkpoint_is_an_error_or_as_saved(sound, data):
    path, files = sound
    restore_files(files)
    file = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[file])
    position = data.draw(st.integers(0, len(content) - 1))
    match data.draw(st.sampled_from(["flip", "flip", "cut", "digit", "zero", "gone"])):
        case "flip":
            content[position] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            content = content[:position]
        case "digit":
            content[position] = ord(data.draw(st.sampled_from("0123456789")))
        case "zero":
            content[position : position + 16] = bytes(len(content[position:][:16]))
        case "gone":
            file.unlink()
    if file.exists():
        file.write_bytes(content)
    ends_well(path)


@ignored
def test_damaged_data_are_an_error_that_names_the_leaf(sound):
    path, files = sound
    # What is large is in a file of its own.
    file = max(files, key=lambda file: len(files[file]))
    errors = 0
    for position in range(0, len(files[file]), 400):
        content = bytearray(files[file])
        content[position] ^= 4
        file.write_bytes(content)
        if ends_well(path):
            errors += 1
            with pytest.raises(
                eqx.LeafError, match=r"`\['big'\]` is damaged"
            ) as caught:
                restored(path)
            assert jax.tree_util.keystr(caught.value.path) == "['big']"
            # Other leaves can be read.
            rest = restored(path, at=["['half']", "['sharded']"])
            assert same(rest["sharded"], DAMAGED["sharded"])
    assert errors > 10


@ignored
@pytest.mark.parametrize("old", ["0.25", "3", "float32[50,50]", "text", "bfloat16"])
def test_damaged_description_is_an_error(sound, old):
    path, files = sound
    file = path / "_METADATA"
    text = files[file].decode()
    start = text.index("equinox_like")
    description = text[start:].replace(old, old[:-1] + "4", 1)
    assert description != text[start:]
    file.write_text(text[:start] + description)
    with pytest.raises(eqx.LeafError, match="damaged"):
        restored(path)


@pytest.mark.parametrize("content", [None, b"", b"0 {}", b"\xff"])
def test_lost_sums_are_an_error_that_says_so(sound, content):
    path, files = sound
    (file,) = [file for file in files if "sums" in file.name]
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(eqx.LeafError) as caught:
        restored(path)
    arrays = ["big", "half", "host", "key", "sharded"]
    assert (
        re.findall(r"`\['(\w+)'\]` is damaged: a checksum of its", str(caught.value))
        == arrays
    )
    assert jax.tree_util.keystr(caught.value.path) == "['big']"


def test_missing_checkpoint_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        restored(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("host", jnp.asarray, r"ArrayImpl int32\[5\] was read, not int64\[5\] on None"),
        (
            "sharded",
            np.asarray,
            r"ndarray float32\[300\] was read, not float32\[300\] on NamedSh",
        ),
        ("big", lambda x: x[0], r" float32\[50\] was read, not float32\[50,50\]"),
        ("key", lambda x: x[:1], r" uint32\[1\] was read, not uint32\[2\]"),
        (
            "half",
            lambda x: x.astype("f4"),
            r" float32\[4,3\] was read, not bfloat16",
        ),
        (
            "sharded",
            lambda x: jax.device_put(x, jax.devices()[1]),
            r"\] was read, not float32\[300\] on NamedSharding",
        ),
        ("rate", None, None),
        ("big", lambda x: -x, "its data do not match its checksum"),
        ("sharded", lambda x: x.at[299].set(0), "its data do not match its checksum"),
        ("big", lambda x: None, "NoneType NoneType was read, not float32"),
    ],
)
def test_what_orbax_reads_is_compared_with_what_was_saved(sound, name, change, problem):
    class Handler(ocp.PyTreeCheckpointHandler):
        def restore(self, directory, args):
            read = super().restore(directory, args=args)
            key = f"['{name}']"
            return read | {key: change(read[key])} if change else read

    with ocp.Checkpointer(orbax.TreeHandler(Handler())) as checkpointer:
        restore = lambda: checkpointer.restore(  # noqa: E731
            sound[0], args=orbax.Restore(DAMAGED)
        )
        if change is None:
            assert all(map(same, *map(jax.tree.leaves, (restore(), DAMAGED))))
            return
        match = rf"`\['{name}'\]` is damaged: .*{problem}"
        with pytest.raises(eqx.LeafError, match=match) as caught:
            restore()
    assert jax.tree_util.keystr(caught.value.path) == f"['{name}']"


@pytest.mark.parametrize("name", ["\udce9", "x" * 70_000], ids=["surrogate", "long"])
def test_name_that_orbax_cannot_store_is_an_error(name):
    class Key:
        def __str__(self):
            return name

    class Node:
        pass

    jax.tree_util.register_pytree_with_keys(
        Node, lambda node: (((Key(), 1.0),), None), lambda *_: Node()
    )
    with pytest.raises(eqx.LeafError, match="is not Unicode, or too long for Orbax"):
        orbax.Save(Node())
