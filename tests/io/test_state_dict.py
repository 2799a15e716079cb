"""Flat dictionaries with dotted names, as other frameworks keep their weights."""

import itertools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import same, whole_trees

import equinox_like as eqx


class Tensor:
    """Turns itself into an array of NumPy, as a tensor of PyTorch does."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)


class Exported:
    """Has no NumPy equivalent, but can be handed over by DLPack."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        raise TypeError("unsupported dtype")

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Sliced(Exported):
    """A slice, whose rows are apart in memory, which JAX does not take by DLPack."""

    def __dlpack__(self, **kwargs):
        raise BufferError("not compact")

    def contiguous(self):
        return Exported(self.array)


def test_names_are_dotted_paths_in_the_order_of_the_leaves():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    names = list(eqx.state_dict({"model": model, "steps": (3, "text")}))
    assert names == [
        "model.layers.0.weight",
        "model.layers.0.bias",
        "model.layers.1.weight",
        "model.layers.1.bias",
        "steps.0",
    ]


@given(whole_trees())
def test_tree_comes_back_from_its_own_state_dict(tree):
    again = eqx.load_state_dict(tree, eqx.state_dict(tree))
    leaves, treedef = jtu.tree_flatten(tree)
    again_leaves, again_treedef = jtu.tree_flatten(again)
    assert treedef == again_treedef and all(map(same, leaves, again_leaves))


def test_numpy_text_comes_back():
    tree = {"text": np.str_("ab"), "bytes": np.bytes_(b"ab")}
    again = eqx.load_state_dict(tree, eqx.state_dict(tree))
    assert again == tree and type(again["text"]) is np.str_


def test_values_of_any_array_library_are_taken_and_copied():
    tree = {
        "a": jnp.zeros(2),
        "b": np.zeros(2),
        "c": jnp.zeros(2, jnp.bfloat16),
        "d": 0.5,
    }
    a = np.ones(2, "float32")
    loaded = eqx.load_state_dict(
        tree,
        {
            "a": a,
            "b": Tensor(np.ones(2)),
            "c": Exported(jnp.ones(2, jnp.bfloat16)),
            "d": np.float64(1.5),
        },
    )
    a[0] = 7
    assert isinstance(loaded["a"], jax.Array) and loaded["a"].tolist() == [1.0, 1.0]
    assert type(loaded["b"]) is np.ndarray and loaded["b"].tolist() == [1.0, 1.0]
    assert loaded["c"].dtype == ml_dtypes.bfloat16 and loaded["c"].sum() == 2
    assert type(loaded["d"]) is float and loaded["d"] == 1.5


def test_slice_of_a_tensor_that_has_no_numpy_dtype_is_taken():
    wanted = jnp.arange(3, dtype=jnp.bfloat16)
    loaded = eqx.load_state_dict([jnp.zeros_like(wanted)], {"0": Sliced(wanted)})
    assert same(loaded[0], wanted)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_arrays_are_placed_as_those_of_the_tree(kind, convert):
    axis_type = jax.sharding.AxisType[kind]
    mesh = jax.make_mesh((4,), ("d",), axis_types=(axis_type,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    tree = {
        "sharded": jax.device_put(jnp.zeros(8), where),
        "elsewhere": jax.device_put(jnp.zeros(3), jax.devices()[2]),
        "key": jax.device_put(jax.random.split(jax.random.key(0), 4), where),
        "struct": jax.ShapeDtypeStruct((4,), "float32", sharding=where),
        "free": jnp.zeros(3),
    }
    values = tree | {"struct": np.ones(4, "f4")}
    values = {name: convert(x) for name, x in eqx.state_dict(values).items()}
    loaded = eqx.load_state_dict(tree, values)
    for name in ("sharded", "elsewhere", "key", "struct"):
        assert loaded[name].committed and loaded[name].sharding == tree[name].sharding
    assert not loaded["free"].committed and loaded["free"].tolist() == [0, 0, 0]
    jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, values)
    assert (
        loaded["sharded"].tolist() == [0] * 8 and loaded["struct"].tolist() == [1] * 4
    )


def test_typed_keys_are_their_data():
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    flat = eqx.state_dict([keys])
    assert flat["0"].dtype == jnp.uint32
    (again,) = eqx.load_state_dict(
        [jax.random.split(jax.random.key(1, impl="rbg"))], flat
    )
    assert same(again, keys)


@pytest.mark.parametrize(
    "rename", [{"weight": "fc.w", "bias": "fc.b"}, lambda name: f"fc.{name[0]}"]
)
def test_names_may_differ(rename):
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    foreign = {"fc.w": np.ones((2, 3), "float32"), "fc.b": np.ones(2, "float32")}
    loaded = eqx.load_state_dict(model, foreign, rename=rename)
    assert loaded.weight.sum() == 6 and loaded.bias.sum() == 2


def test_all_differences_are_listed_together():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2), "c": 3, "d": jnp.ones(1), "e": 1}
    mapping = {
        "a": np.ones(3, "float32"),
        "b": np.ones(2),
        "c": 3.5,
        "e": object(),
        "f": np.ones(1),
    }
    with pytest.raises(eqx.LeafError) as caught:
        eqx.load_state_dict(tree, mapping)
    for line in (
        "`a` is float32[3] in the mapping, but float32[2] in `tree`",
        "`b` is float64[2] in the mapping, but float32[2] in `tree`",
        "`c` is float64[] in the mapping, but a Python int in `tree`",
        "`e` is of type object in the mapping, but an array in `tree`",
        "missing in the mapping: `d`",
        "only in the mapping: `f`",
    ):
        assert line in str(caught.value)
    assert jtu.keystr(caught.value.path) == "['a']"


def test_error_says_where_running_statistics_belong():
    make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
    norm, _ = make(2, "batch", mode="batch")
    theirs = {
        "weight": np.ones(2, "float32"),
        "bias": np.zeros(2, "float32"),
        "running_mean": np.zeros(2, "float32"),
        "running_var": np.ones(2, "float32"),
        "num_batches_tracked": np.array(7),
    }
    with pytest.raises(eqx.LeafError, match=r"belong to its state.*`state.set`"):
        eqx.load_state_dict(norm, theirs)
    with pytest.raises(eqx.LeafError) as caught:
        eqx.load_state_dict(norm, {"weight": theirs["weight"], "other": 1})
    assert "state.set" not in str(caught.value)


def test_struct_of_a_dtype_that_jax_lacks_is_refused():
    like = {"a": jax.ShapeDtypeStruct((1,), "int64")}
    with pytest.raises(eqx.LeafError, match=r"has the dtype int64.*`jax_enable_x64`"):
        eqx.load_state_dict(like, {"a": np.array([2**40])})


def test_without_strict_the_rest_stays():
    tree = {"a": jnp.zeros(2), "b": 3}
    loaded = eqx.load_state_dict(
        tree, {"a": np.ones(2, "float32"), "z": 1}, strict=False
    )
    assert loaded["b"] == 3 and loaded["a"].sum() == 2
    with pytest.raises(eqx.LeafError, match="`a` is float64"):
        eqx.load_state_dict(tree, {"a": np.ones(2)}, strict=False)


def test_settings_that_other_frameworks_do_not_save_stay():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.3)]
    )
    theirs = {name: np.ones_like(x) for name, x in eqx.state_dict(model[0]).items()}
    rename = lambda name: name.removeprefix("layers.0.")  # noqa: E731
    loaded = eqx.load_state_dict(model, theirs, rename=rename)
    assert loaded[0].weight.sum() == 6 and loaded[1].p == 0.3
    with pytest.raises(
        eqx.LeafError, match=r"missing in the mapping: `bias` for `layers\.0\.bias`"
    ):
        eqx.load_state_dict(model, {"weight": theirs["weight"]}, rename=rename)


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"`tree\['a'\]\['b'\]` and `tree\['a\.b'\]`"):
        eqx.state_dict({"a.b": 1, "a": {"b": 2}})


def answer_of(error, start):
    """The code at the end of a message, from `start` on."""
    return str(error.value).rpartition(f"`{start}")[2].removesuffix("`.")


@pytest.mark.parametrize("prefix", ["model.", "module.", "transformer.h."])
@pytest.mark.parametrize("strict", [True, False])
def test_prefix_of_all_names_is_answered_by_the_rename(prefix, strict):
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    like = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    theirs = {prefix + name: x for name, x in eqx.state_dict(model).items()}
    with pytest.raises(eqx.LeafError, match=r"missing.*`layers\.0\.weight`") as error:
        eqx.load_state_dict(like, theirs, strict=strict)
    code = answer_of(error, "rename=")
    assert code == f"lambda name: {prefix!r} + name"
    loaded = eqx.load_state_dict(like, theirs, rename=eval(code))
    assert eqx.tree_equal(loaded, eqx.filter(model, eqx.is_array))


def test_prefix_that_only_the_tree_has_is_answered_by_the_rename():
    model = {"model": eqx.nn.Linear(2, 2, key=jax.random.key(0))}
    theirs = eqx.state_dict(model["model"])
    with pytest.raises(eqx.LeafError) as error:
        eqx.load_state_dict(model, theirs)
    code = answer_of(error, "rename=")
    assert code == "lambda name: name.removeprefix('model.')"
    assert eqx.tree_equal(eqx.load_state_dict(model, theirs, rename=eval(code)), model)


def test_other_names_beside_those_with_a_prefix_need_strict_too():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    theirs = {f"fc.{name}": x for name, x in eqx.state_dict(model).items()}
    with pytest.raises(eqx.LeafError) as error:
        eqx.load_state_dict(model, theirs | {"head.weight": jnp.ones(2)})
    code = answer_of(error, "rename=")
    assert code == "lambda name: 'fc.' + name, strict=False"
    # Where some names agree, or end otherwise, one rename does not fit all.
    for theirs in ({"weight": model.weight, "fc.bias": model.bias}, {"w": 1, "b": 2}):
        with pytest.raises(eqx.LeafError, match="Pass `rename` if they have other"):
            eqx.load_state_dict(model, theirs)


class Net(eqx.Module):
    embedding: eqx.nn.Embedding
    h: eqx.nn.Stacked

    def __init__(self, key):
        make = lambda key: eqx.nn.MLP(2, 2, 4, 1, key=key)  # noqa: E731
        self.embedding = eqx.nn.Embedding(3, 2, key=key)
        self.h = eqx.nn.Stacked(make, 3, key=key)


def unstacked(tree):
    """`tree` with a list of layers in place of each `Stacked`."""
    is_stacked = lambda x: isinstance(x, eqx.nn.Stacked)  # noqa: E731
    change = lambda x: list(map(unstacked, x.unstack())) if is_stacked(x) else x  # noqa: E731
    return jax.tree.map(change, tree, is_leaf=is_stacked)


@pytest.mark.parametrize(
    "take", [lambda m: m, lambda m: {"a": m}, lambda m: m.h, lambda m: eqx.frozen(m)]
)
def test_stacked_and_layers_one_by_one_load_into_each_other(take):
    model, like = (take(Net(jax.random.key(i))) for i in range(2))
    mapping = eqx.state_dict(unstacked(model))
    again = eqx.state_dict(model, unstack=True)
    assert list(again) == list(mapping) and eqx.tree_equal(again, mapping)
    assert eqx.tree_equal(eqx.load_state_dict(like, mapping), model)
    layers = eqx.load_state_dict(unstacked(like), again)
    assert eqx.tree_equal(layers, unstacked(model))
    # Names of the whole `Stacked` are what they were, and are read as well.
    assert eqx.tree_equal(eqx.load_state_dict(like, eqx.state_dict(model)), model)


class Holder(eqx.Module):
    held: dict


# What a tree is made of: shapes and dtypes of arrays, by name, and at a depth the layers
# of a `Stacked`.
ARRAYS = st.tuples(
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
)
TREES = st.recursive(
    st.dictionaries(st.sampled_from("ab"), ARRAYS, max_size=2),
    lambda held: st.dictionaries(
        st.sampled_from("abc"), held | st.tuples(st.integers(1, 11), held), max_size=2
    ),
    max_leaves=4,
)


def filled(what, count):
    """The tree with other numbers in each array, in one and the same order."""
    if isinstance(what, dict):
        return Holder({name: filled(held, count) for name, held in what.items()})
    first, second = what
    if isinstance(first, int):
        layers = [filled(second, count) for _ in range(first)]
        return eqx.nn.Stacked.from_layers(layers)
    numbers = next(count) + np.arange(np.prod(first))
    return jnp.asarray(numbers.reshape(first)).astype(second)


@given(TREES)
def test_stacked_and_layers_of_any_tree_load_into_each_other(what):
    model, like = (filled(what, itertools.count(start)) for start in (1, 50))
    one_by_one = unstacked(model)
    names = eqx.state_dict(model, unstack=True)
    assert list(names) == list(eqx.state_dict(one_by_one))
    assert eqx.tree_equal(names, eqx.state_dict(one_by_one))
    assert eqx.tree_equal(eqx.load_state_dict(like, names), model)
    assert eqx.tree_equal(eqx.load_state_dict(unstacked(like), names), one_by_one)


class Layer(eqx.Module):
    """One layer with leaves of each kind, which has layers itself."""

    inner: eqx.nn.Stacked
    array: np.ndarray
    key: jax.Array
    rate: float
    scale: jax.Array
    none: None = None

    def __init__(self, value, depth):
        linears = [eqx.nn.Linear(1, 2, key=jax.random.key(i)) for i in range(depth)]
        self.inner = eqx.nn.Stacked.from_layers(
            [eqx.tree_at("weight", x, x.weight + value) for x in linears]
        )
        self.array = np.full(2, value, "float32")
        self.key = jax.random.key(value, impl="rbg")
        self.rate = 0.5
        self.scale = jnp.array(value, jnp.bfloat16)


def nested(value, depths):
    outer, inner = depths
    layers = [Layer(value + i, inner) for i in range(outer)]
    stacked = eqx.nn.Stacked.from_layers(layers)
    array = np.stack([layer.array for layer in layers])  # which stays in NumPy
    return {
        "x.y": 3,
        "h": eqx.tree_at("layers.array", stacked, array),
        "z": jnp.ones(2) * value,
    }


@pytest.mark.parametrize("depths", [(1, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, Tensor])
def test_stacked_layers_of_a_stacked_load_from_their_own_names(depths, convert):
    tree, like = nested(0, depths), nested(7, depths)
    mapping = eqx.state_dict(tree, unstack=True)
    assert mapping["h.0.inner.0.weight"].shape == (2, 1)
    assert list(mapping) == list(eqx.state_dict(unstacked(tree)))
    loaded = eqx.load_state_dict(like, {k: convert(v) for k, v in mapping.items()})
    assert eqx.tree_equal(loaded, tree)
    assert type(loaded["h"].layers.array) is np.ndarray
    structs = eqx.filter_eval_shape(lambda: eqx.filter(like, eqx.is_array))
    wanted = eqx.filter(tree, eqx.is_array)
    loaded = eqx.load_state_dict(structs, mapping, strict=False)
    jax.tree.map(np.testing.assert_array_equal, *map(numbers, (loaded, wanted)))


def numbers(tree):
    return list(eqx.state_dict(tree).values())


@pytest.mark.parametrize("as_table", [True, False])
def test_layers_one_by_one_have_other_names(as_table):
    model, like = (Net(jax.random.key(i)) for i in range(2))
    names = {}
    for name in eqx.state_dict(model, unstack=True):
        names[name] = "transformer." + name.replace(".layers.", ".mlp.")
    theirs = {names[k]: v for k, v in eqx.state_dict(model, unstack=True).items()}
    rename = names if as_table else lambda name: names.get(name, name)
    assert eqx.tree_equal(eqx.load_state_dict(like, theirs, rename=rename), model)


def test_prefix_of_layers_one_by_one_is_answered_by_the_rename():
    model, like = (Net(jax.random.key(i)) for i in range(2))
    mapping = eqx.state_dict(model, unstack=True)
    with pytest.raises(eqx.LeafError, match=r"`h\.0\.layers\.0\.weight`") as error:
        eqx.load_state_dict(like, {f"model.{k}": v for k, v in mapping.items()})
    assert answer_of(error, "rename=") == "lambda name: 'model.' + name"


def test_what_is_wrong_with_a_layer_is_named():
    model = Net(jax.random.key(0))
    mapping = eqx.state_dict(model, unstack=True)
    mapping["h.1.layers.0.bias"] = np.ones(5, "f4")
    del mapping["h.2.layers.1.weight"]
    mapping["h.3.layers.1.weight"] = np.ones((2, 4), "f4")
    with pytest.raises(eqx.LeafError) as caught:
        eqx.load_state_dict(model, mapping)
    for line in (
        "`h.1.layers.0.bias` is float32[5] in the mapping, but float32[4] in `tree`",
        "missing in the mapping: `h.2.layers.1.weight`\n",
        "only in the mapping: `h.3.layers.1.weight`\n",
    ):
        assert line in str(caught.value)
    assert jtu.keystr(caught.value.path) == ".h.layers.layers[0].bias"
    # All layers lack a leaf.
    mapping = {k: v for k, v in mapping.items() if "1.weight" not in k}
    with pytest.raises(eqx.LeafError, match=r"missing.*`h\.0\.layers\.1\.weight`"):
        eqx.load_state_dict(model, mapping)


def test_without_strict_the_layers_that_are_missing_stay():
    model, like = (Net(jax.random.key(i)) for i in range(2))
    mapping = eqx.state_dict(model, unstack=True)
    mapping = {k: v for k, v in mapping.items() if not k.startswith("h.1")}
    loaded = eqx.load_state_dict(like, mapping, strict=False)
    for i, wanted in enumerate((model, like, model)):
        assert eqx.tree_equal(loaded.h[i], wanted.h[i])


def test_setting_that_differs_between_layers_is_refused():
    layers = [eqx.nn.Dropout(0.1) for _ in range(3)]
    stacked = eqx.nn.Stacked.from_layers(layers)
    mapping = {"0.p": 0.2, "1.p": 0.2, "2.p": 0.2}
    mapping |= {f"{i}.inference": False for i in range(3)}
    loaded = eqx.load_state_dict(stacked, mapping)
    assert type(loaded.layers.p) is float and loaded.layers.p == 0.2
    match = r"`0\.p` is 0\.2, `1\.p` is 0\.2, `2\.p` is 0\.3\. .*give them the same\."
    with pytest.raises(eqx.LeafError, match=match):
        eqx.load_state_dict(stacked, mapping | {"2.p": 0.3})


def test_ensemble_of_stacked_layers_keeps_the_names():
    models = eqx.filter_vmap(Net)(jax.random.split(jax.random.key(0), 2))
    mapping = eqx.state_dict(models, unstack=True)
    assert eqx.tree_equal(mapping, eqx.state_dict(models))
    assert eqx.tree_equal(eqx.load_state_dict(models, mapping), models)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_layers_one_by_one_are_placed_as_the_tree(convert):
    mesh = jax.make_mesh((4,), ("d",))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
    layers = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(2)]
    like = eqx.filter_shard(eqx.nn.Stacked.from_layers(layers), where)
    mapping = {k: convert(v) for k, v in eqx.state_dict(layers).items()}
    loaded = eqx.load_state_dict(like, mapping)
    assert loaded.layers.weight.sharding == where and loaded.layers.weight.committed
    assert eqx.tree_equal(list(loaded.unstack()), layers)


def test_float64_is_answered_by_the_conversion(tmp_path):
    like, theirs = {"w": jnp.zeros(2)}, {"w": np.ones(2)}
    eqx.save(tmp_path / "m", theirs)
    for load in (
        lambda: eqx.load_state_dict(like, theirs),
        lambda: eqx.load(tmp_path / "m", like),
    ):
        with pytest.raises(eqx.LeafError, match=r"`x\.astype\('float32'\)`\.$"):
            load()
    converted = {name: x.astype("float32") for name, x in theirs.items()}
    assert eqx.load_state_dict(like, converted)["w"].sum() == 2
    with pytest.raises(eqx.LeafError, match="int32") as error:
        eqx.load_state_dict(like, {"w": np.ones(2, "int32")})
    assert "astype" not in str(error.value)
