"""Wrong arguments: errors name the argument and the fix, and no file is lost."""

import io
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

pytestmark = pytest.mark.usefixtures("without_type_checks")

X = jnp.ones(3)
MODEL = nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
WIDER = nn.MLP(2, 2, 8, 1, key=jax.random.key(0))


def loss(model, x):
    return model(x).sum()


def same(*args):
    return args[0] if len(args) == 1 else args


def raises(error, text):
    return pytest.raises(error, match=re.escape(text))


# Files


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with two files of `MODEL`."""
    monkeypatch.chdir(tmp_path)
    eqx.save("a", MODEL)
    eqx.tree_serialise_leaves("a", MODEL)
    return tmp_path


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: eqx.save("a", nn.MLP), TypeError, "`tree` is the class `MLP`"),
        (lambda: eqx.save("a", loss), TypeError, "`tree` is the function `loss`"),
        (
            lambda: eqx.tree_serialise_leaves("a", nn.MLP),
            TypeError,
            "`pytree` is the c",
        ),
        (lambda: eqx.load("a", nn.MLP), TypeError, "`like` is the class `MLP`"),
        (
            lambda: eqx.tree_deserialise_leaves("a", nn.MLP),
            TypeError,
            "`like` is the cl",
        ),
        (lambda: eqx.load_state_dict(nn.MLP, {}), TypeError, "`tree` is the class"),
        (lambda: eqx.save("", MODEL), ValueError, "`path_or_file` must end with"),
        (lambda: eqx.save(".", MODEL), ValueError, "`path_or_file` must end with"),
        (lambda: eqx.save("b/..", MODEL), ValueError, "`path_or_file` must end"),
        (
            lambda: eqx.tree_serialise_leaves("", MODEL),
            ValueError,
            "`path_or_file` must",
        ),
        (lambda: eqx.save(MODEL, "a"), TypeError, "first argument, must be a path, or"),
        (
            lambda: eqx.save(None, MODEL),
            TypeError,
            "a binary file with a method `write`; got None",
        ),
        (lambda: eqx.save("a", MODEL, "note"), TypeError, "`metadata` must be a dict"),
        (lambda: eqx.load(io.BytesIO(), MODEL), RuntimeError, "`file.seek(0)` first"),
        (lambda: eqx.load_metadata(3), TypeError, "got an int"),
        (
            lambda: eqx.load("a.eqx", MODEL),
            RuntimeError,
            "`tree_deserialise_leaves` lo",
        ),
        (
            lambda: eqx.tree_deserialise_leaves("a.safetensors", MODEL),
            RuntimeError,
            "`load` reads safetensors files",
        ),
    ],
)
def test_wrong_file_or_tree_is_named_and_no_file_is_lost(saved, call, error, text):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with raises(error, text):
        call()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("mode", ["rb", "w"])
def test_file_that_cannot_be_written_is_named(saved, mode):
    with open("a.eqx" if mode == "rb" else "new", mode) as file:
        with raises(RuntimeError, "the file with the mode 'wb'"):
            eqx.tree_serialise_leaves(file, MODEL)


@pytest.mark.parametrize("mode", ["r", "wb"])
def test_file_that_cannot_be_read_is_named(saved, mode):
    with open("a.eqx" if mode == "r" else "new", mode) as file:
        with raises(RuntimeError, "Open the file with the mode 'rb'"):
            eqx.tree_deserialise_leaves(file, MODEL)


def test_text_file_is_fine_for_a_function_that_writes_text(saved):
    with open("text", "w") as file:
        eqx.tree_serialise_leaves(file, [1, 2], lambda f, x: f.write(str(x)))
    with open("text") as file:
        assert file.read() == "12"


def test_traced_tree_can_be_loaded_into(saved):
    loaded = eqx.filter_jit(lambda model: eqx.load("a", model))(MODEL)
    assert eqx.tree_equal(loaded, MODEL)


def test_loading_nothing_at_all_is_an_error(saved):
    other, both = {"v": np.ones(2)}, r"missing in the .*\bv\b.*\n.*only in .*weight"
    with pytest.raises(eqx.LeafError, match=both):
        eqx.load("a", other, strict=False)
    with pytest.raises(eqx.LeafError, match=both):
        eqx.load_state_dict(other, eqx.state_dict(MODEL), strict=False)
    assert eqx.load("a", {}, strict=False) == {}
    assert eqx.load_state_dict(other, {}, strict=False) == other


def test_state_dict_and_renamed_names_must_exist():
    with raises(TypeError, "`mapping` must be a dictionary from names to arrays"):
        eqx.load_state_dict(eqx.state_dict(MODEL), MODEL)
    with raises(TypeError, "got a list"):
        eqx.load_state_dict(MODEL, list(eqx.state_dict(MODEL).items()))
    layer = nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
    foreign = {"w": np.zeros((2, 2), "f4")}
    with raises(ValueError, "`rename` has keys that are not names in `tree`: `weigth`"):
        eqx.load_state_dict(layer, foreign, rename={"weigth": "w"}, strict=False)
    table = {"weight": "w", "bias": "b"}
    assert not eqx.load_state_dict(layer, foreign, rename=table).weight.any()


# Functions, integers and options


@eqx.filter_custom_vjp
def custom_vjp(x):
    return x


@eqx.filter_custom_jvp
def custom_jvp(x):
    return x


@eqx.filter_custom_vmap
def custom_vmap(x):
    return x


def padded(x, lengths):
    return x


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: eqx.filter_scan(X, same, 0.0),
            "`filter_scan` takes a function as `f`",
        ),
        (lambda: eqx.filter_map(X, same), "`f`; got float32[3]"),
        (lambda: eqx.filter_cond(True, 3, same, X), "as `true_fun`; got an int"),
        (lambda: eqx.filter_cond(True, same, 3, X), "as `false_fun`; got an int"),
        (lambda: eqx.filter_switch(0, [same, 3], X), "as `branches[1]`; got an int"),
        (lambda: eqx.filter_switch(0, same, X), "functions as `branches`; got a f"),
        (lambda: eqx.filter_while_loop(3, same, X), "as `cond`; got an int"),
        (lambda: eqx.filter_while_loop(same, 3, X), "as `body`; got an int"),
        (lambda: eqx.filter_fori_loop(0, 2, X, same), "as `body`; got float32[3]"),
        (lambda: eqx.filter_eval_shape(3), "as `fun`; got an int"),
        (lambda: eqx.Layout("data=-1").init(3), "`Layout.init` takes a function as"),
        (lambda: eqx.internal.split(X, 3), "`split` takes a function as `label`"),
        (lambda: eqx.tree_at("[0]", [X], replace_fn=3), "as `replace_fn`; got an int"),
        (lambda: eqx.select(X).where(3), "`where` takes a function as `predicate`"),
        (lambda: eqx.select(X).apply(3), "`apply` takes a function as `fn`"),
        (
            lambda: eqx.bucketed(padded, {"x": {0: [4]}}, crop=3),
            "as `crop`; got an int",
        ),
        (lambda: eqx.bucketed(3, {}), "`bucketed` wraps a function"),
        (lambda: eqx.filter_export(3), "`filter_export` wraps a function"),
        (lambda: custom_vjp.def_fwd(3), "`def_fwd` takes a function as `fwd`"),
        (lambda: custom_vjp.def_bwd(3), "`def_bwd` takes a function as `bwd`"),
        (lambda: custom_jvp.def_jvp(3), "`def_jvp` takes a function as `rule`"),
        (lambda: custom_vmap.def_vmap(3), "`def_vmap` takes a function as `rule`"),
        (
            lambda: eqx.filter_checkpoint(same, policy="dots_saveable"),
            "pass `jax.checkpoint_policies.dots_saveable` instead of its name",
        ),
        (lambda: eqx.filter_checkpoint(same, policy=3), "as `policy`; got an int"),
    ],
)
def test_what_is_not_callable_is_named(call, text):
    with raises(TypeError, text):
        call()


def scan(**options):
    return eqx.filter_scan(lambda c, x: (c, x), 0.0, **options)


def while_loop(**options):
    return eqx.filter_while_loop(lambda c: c < 1, same, X[0], **options)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: scan(length=-1), ValueError, "`length` must be at least 0; got -1"),
        (lambda: scan(length=2.5), TypeError, "`length` must be an integer; got 2.5"),
        (lambda: scan(xs=X, unroll="a"), TypeError, "`unroll` must be an integer"),
        (lambda: scan(xs=X, unroll=0), ValueError, "`unroll` must be at least 1"),
        (
            lambda: scan(xs=X, checkpoint="al"),
            ValueError,
            "an integer, 'all', or one of",
        ),
        (
            lambda: scan(
                xs=X, checkpoint=jax.checkpoint_policies.save_only_these_names
            ),
            ValueError,
            "`jax.checkpoint_policies.save_only_these_names(...)` returns",
        ),
        (
            lambda: eqx.filter_checkpoint(
                same, policy=jax.checkpoint_policies.save_any_names_but_these
            ),
            ValueError,
            "`jax.checkpoint_policies.save_any_names_but_these(...)` returns",
        ),
        (
            lambda: while_loop(max_steps=1.5),
            TypeError,
            "`max_steps` must be an integer",
        ),
        (
            lambda: while_loop(max_steps="a"),
            TypeError,
            "`max_steps` must be an integer",
        ),
        (
            lambda: eqx.filter_fori_loop(0, 2, same, X, unroll=1.5),
            TypeError,
            "`filter_fori_loop`: `unroll` must be an integer",
        ),
        (
            lambda: eqx.filter_fori_loop(0, X, same, X),
            TypeError,
            "`upper` must be an integer; got float32[3]",
        ),
        (
            lambda: eqx.filter_fori_loop(None, 2, same, X),
            TypeError,
            "`lower` must be an integer; got None",
        ),
        (
            lambda: eqx.filter_map(same, X, batch_size=0),
            ValueError,
            "`batch_size` must",
        ),
        (lambda: eqx.filter_map(same, X, batch_size=-1), ValueError, "at least 1; got"),
        (
            lambda: eqx.filter_map(same, X, batch_size="a"),
            TypeError,
            "`batch_size` must",
        ),
        (
            lambda: eqx.filter_cond(X > 0, same, same, X),
            TypeError,
            "`pred` must be a boolean scalar; got bool[3]. To choose for each",
        ),
        (
            lambda: eqx.filter_cond(None, same, same, X),
            TypeError,
            "`filter_cond`: `pred` must be a boolean scalar; got None.",
        ),
        (
            lambda: eqx.filter_cond(jax.random.key(0), same, same, X),
            TypeError,
            "`pred` must be a boolean scalar; got key",
        ),
        (
            lambda: eqx.filter_switch(X, [same, same], X),
            TypeError,
            "`index` must be an integer scalar; got float32[3].",
        ),
        (
            lambda: eqx.filter_switch(True, [same, same], X),
            TypeError,
            "`filter_switch`: `index` must be an integer scalar; got a bool.",
        ),
        (
            lambda: eqx.filter_switch(2, [same, same], X),
            ValueError,
            "index 2 is out of",
        ),
        (
            lambda: eqx.filter_switch(jnp.asarray(0), [], X),
            ValueError,
            "there are no branches",
        ),
        (lambda: eqx.select(X).count("1"), TypeError, "`n` must be an integer; got"),
        (lambda: eqx.if_array("a"), TypeError, "`axis` must be an integer; got 'a'"),
        (lambda: eqx.if_array(0.5), TypeError, "`axis` must be an integer; got 0.5"),
        (
            lambda: eqx.debug.assert_max_traces(same, max_traces=-1),
            ValueError,
            "`max_traces` must be at least 0",
        ),
        (
            lambda: eqx.debug.assert_max_traces(same, max_traces="a"),
            TypeError,
            "`max_traces` must be an integer",
        ),
        (
            lambda: eqx.bucketed(padded, {"x": [4]}),
            TypeError,
            "as in `{'x': {0: [8, 64",
        ),
        (lambda: eqx.bucketed(padded, [4]), TypeError, "as in `{'x': {0: [8, 64]}}`"),
        (
            lambda: eqx.bucketed(padded, {"x": {"0": [4]}}),
            TypeError,
            "`key in axes['x']` must be an integer; got '0'",
        ),
        (
            lambda: eqx.bucketed(padded, {"x": {-1: [4]}}),
            ValueError,
            "`key in axes['x']` must be at least 0; got -1",
        ),
        (
            lambda: eqx.bucketed(padded, {"x": {0: str}})(X),
            TypeError,
            "`axes['x'][0](...)` must be an integer; got '3'",
        ),
    ],
)
def test_wrong_number_or_option_is_named(call, error, text):
    with raises(error, text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: eqx.filter_jit(same, dontae="all"),
            "`dontae`. Did you mean `donate`?",
        ),
        (lambda: eqx.filter_vmap(same, in_axis=0), "Did you mean `in_axes`?"),
        (lambda: eqx.filter_grad(same, wtr="x"), "`filter_grad` has no option `wtr`"),
        (lambda: eqx.filter_jacfwd(same, holomorph=1), "Did you mean `holomorphic`?"),
        (lambda: eqx.filter_hessian(same, nothing=1), "`filter_hessian` has no option"),
    ],
)
def test_unknown_option_is_named_with_the_nearest_one(call, text):
    with raises(TypeError, text):
        call()


def step(model, opt_state, x):
    return model


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: eqx.filter_jit(step, donate="model"), 'write `donate=("model",)`.'),
        (lambda: eqx.filter_jit(donate="model")(step), 'write `donate=("model",)`.'),
        (
            lambda: eqx.filter_jit(step, donate="all_except_first"),
            """Did you mean `donate="all-except-first"`? To donate a parameter, write """
            """`donate=("all_except_first",)`.""",
        ),
        (
            lambda: eqx.filter_jit(step, donate="all except first"),
            'Did you mean `donate="all-except-first"`?',
        ),
        (lambda: eqx.filter_jit(step, donate=("modle",)), "Did you mean 'model'?"),
        (
            lambda: eqx.filter_vmap(step, in_axes={"modle": 0})(X, X, X),
            "Did you mean 'model'?",
        ),
        (
            lambda: eqx.filter_vmap(step, in_axes="x")(X, X, X),
            "`in_axes` gives 'x'. By name: `in_axes={'x': 0}`.",
        ),
        (
            lambda: eqx.filter_while_loop(bool, same, 0, kind="checkpoint"),
            'Did you mean "checkpointed"?',
        ),
        (
            lambda: eqx.internal.scan(same, 0, X, kind="checkpoint"),
            'Did you mean "checkpointed"?',
        ),
        (
            lambda: eqx.load_state_dict(MODEL, {}, rename={"layers.0.wieght": "w"}),
            "Did you mean `layers.0.weight`?",
        ),
        (
            lambda: eqx.Layout(MESH, [("layer[0].weight", P())]).shardings(MODEL),
            "Did you mean `layers[0].weight`?",
        ),
        (lambda: eqx.capture(MODEL, "layer[*]")(X[:2]), "Did you mean `layers[*]`?"),
        (lambda: eqx.select(MODEL).at("layer[*]").set(0), "Did you mean `layers[*]`?"),
        (
            lambda: eqx.select(MODEL).at("layer[0].weight", "**.bias").count(3),
            "Did you mean `layers[0].weight`?",
        ),
        (
            lambda: eqx.select(MODEL).at("**.wieght").apply(same),
            "Did you mean `**.weight`?",
        ),
        (
            lambda: eqx.tree_at("layer[0]", MODEL, 0),
            "has no `.layer`. Did you mean `.layers`?",
        ),
        (
            lambda: eqx.tree_at("layers[0].wieght", MODEL, 0),
            "has no `.wieght`. Did you mean `.weight`?",
        ),
        (
            lambda: eqx.tree_at("encodr", {"encoder": 0, "b": 1}, 0),
            "Did you mean `['encoder']`?",
        ),
        (
            lambda: eqx.tree_at("layers.0.weight", MODEL, 0),
            "Did you mean `layers[0].weight`?",
        ),
        (
            lambda: eqx.tree_at("model.layers[0].bias", MODEL, 0),
            "Write the path without the name of the tree: `layers[0].bias`.",
        ),
    ],
)
def test_misspelt_name_mode_or_path_is_answered_by_the_right_one(call, text):
    with pytest.raises(ValueError, match=re.escape(text) + "$"):
        call()


def test_other_words_of_modes_are_answered_by_the_right_one():
    with raises(TypeError, "Did you mean 'inputs'?"):
        eqx.capture(MODEL, "layers[0]", of="input")
    with raises(RuntimeError, "Did you mean 'breakpoint'?"):
        eqx.error_if(X, X > 2, "too large", on_error="breakpont")


def test_index_or_name_that_is_like_no_other_has_no_suggestion():
    for path in ("layers[9]", "encoder", "['encoder']"):
        with pytest.raises(ValueError, match=r"which has no `.*`\.$"):
            eqx.tree_at(path, MODEL, 0)


def test_selection_that_is_empty_shows_what_was_meant():
    assert repr(eqx.select(MODEL).at("layer[*]")).endswith("Did you mean `layers[*]`?>")
    assert "mean" not in repr(eqx.select(MODEL).at("layers[*]"))


LISTS = [
    ("layers[7]", MODEL, "`layers` has length 2."),
    ("layers[-3]", MODEL, "`layers` has length 2."),
    ("layers[7].weight", MODEL, "`layers` has length 2."),
    ("layers[12].**", MODEL, "`layers` has length 2."),
    ("[3]", [1, None], "`<root>` has length 2."),
    ("['a'][1][2]", {"a": [1, (2, 3)]}, "`['a'][1]` has length 2."),
    ("blocks[1][5]", {"blocks": [[1], [2]]}, "Did you mean"),  # of another form
    ("[3]", {0: 1, 5: 2}, "Did you mean `[5]`?"),  # the keys of a dictionary
    ("layers[0].weight[3]", MODEL, "Did you mean `layers[0].weight`?"),
]


@pytest.mark.parametrize(("path", "tree", "text"), LISTS)
def test_index_out_of_range_tells_the_length(path, tree, text):
    chosen = eqx.select(tree).at(path)
    assert text in repr(chosen)
    with raises(ValueError, text):
        chosen.set(0)


def test_index_out_of_range_tells_the_length_wherever_paths_are_taken():
    stack = nn.Sequential([MODEL, nn.Identity()])  # which has no leaf
    key = jax.random.key(0)
    for call in (
        lambda: nn.reinit(stack, [("layers[2].layers[0].weight", "zeros")], key=key),
        lambda: nn.add_lora(stack, "layers[2]", rank=1, key=key),
        lambda: nn.quantize(stack, where="layers[2]"),
    ):
        with raises(ValueError, "`layers` has length 2."):
            call()
    with raises(
        ValueError, "`pytree.layers` is a tuple of length 2, which has no `[7]`."
    ):
        eqx.tree_at("layers[7]", stack, 0)


@pytest.mark.parametrize("name", ["forward", "apply", "call"])
def test_module_without_a_call_is_answered_by_the_name_of_its_method(name):
    cls = type(eqx.Module)("Net", (eqx.Module,), {name: lambda self, x: x})
    net: Any = cls()
    assert not callable(net) and getattr(net, name)(1) == 1
    for call in (
        lambda: eqx.filter_jit(net),
        lambda: eqx.filter_vmap(net),
        lambda: eqx.filter_scan(net, 0, length=1),
        lambda: nn.Sequential([net])(X),
        lambda: nn.Lambda(net),
        lambda: nn.RNN([net]),
    ):
        with raises(TypeError, f"Rename its method `{name}` to `__call__`."):
            call()


def test_other_objects_that_cannot_be_called_have_no_such_answer():
    class Frame:
        def apply(self):
            pass

    for fun in (Frame(), 3, MODEL.layers):
        with pytest.raises(TypeError) as caught:
            eqx.filter_jit(fun)  # pyright: ignore -- that is the mistake
        assert "Rename" not in str(caught.value)


def test_functions_may_come_from_a_generator():
    branches = (f for f in [jnp.sin, jnp.cos])
    assert eqx.filter_switch(jnp.asarray(1), branches, jnp.asarray(0.0)) == 1
    messages = (text for text in ["first", "second"])
    with pytest.raises(eqx.EquinoxRuntimeError, match="second"):
        eqx.branched_error_if(X, True, 1, messages)


def test_count_of_a_compiled_function_says_how_to_count_its_traces():
    counted = eqx.debug.assert_max_traces(eqx.filter_jit(same), max_traces=1)
    counted(X)
    with raises(RuntimeError, "`filter_jit(assert_max_traces(same, max_traces=1))`"):
        counted(X)


# Trees


def twice(x, y):
    return 2 * x, y


LINEAR = eqx.filter_linearize(twice, X, X)[1]
PULLBACK = eqx.filter_vjp(lambda x: {"a": x}, X)[1]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: eqx.internal.merge(*eqx.internal.split(X, lambda x: "a")[::-1]),
            TypeError,
            "`merge` takes the groups first",
        ),
        (
            lambda: eqx.filter(MODEL, lambda x: x > 0),
            ValueError,
            "returned bool[4,2] for `pytree.layers[0].weight`",
        ),
        (
            lambda: eqx.partition([X, X], [True, lambda x: x > 0]),
            ValueError,
            "returned bool[3] for `pytree[1]`",
        ),
        (lambda: eqx.select(X).at(nn.Linear), TypeError, "`at` takes patterns"),
        (lambda: eqx.intervene(MODEL, {nn.Linear: same}), TypeError, "takes patterns"),
        (lambda: eqx.intervene(MODEL, [same]), TypeError, "must be a dictionary from"),
        (lambda: eqx.intervene(nn.MLP, {}), TypeError, "`model` is the class `MLP`"),
        (lambda: eqx.intervene(3, {}), TypeError, "`intervene` wraps a function"),
        (lambda: eqx.capture(nn.MLP, "**"), TypeError, "`model` is the class `MLP`"),
        (lambda: eqx.tag("h", X), TypeError, "`tag` takes the value first"),
        (
            lambda: eqx.tree_at(MODEL, lambda m: m.layers[0], 3),
            TypeError,
            "first argument of `tree_at` is `where`, a function of the tree, and the "
            "second one is the tree. As `where` it got an MLP",
        ),
        (
            lambda: eqx.tree_at(nn.Dropout, MODEL, 3),
            TypeError,
            ".Dropout'>, which fails on the tree: ValueError",
        ),
        (
            lambda: eqx.tree_at(lambda m: m.layers, nn.MLP, 3),
            TypeError,
            "`pytree` is the class `MLP`",
        ),
        (
            lambda: eqx.filter_grad(loss, wrt="layers[0]")(MODEL, X[:2]),
            ValueError,
            "The leaves of `wrt` must be",
        ),
        (
            lambda: eqx.filter_grad(lambda p: p["w"], wrt={"b": True})({"w": 1.0}),
            ValueError,
            "`x` is a dict with the keys ['w'].",
        ),
        (lambda: LINEAR(X), ValueError, "a tuple of length 2; got a tuple of length 1"),
        (
            lambda: PULLBACK({"b": X}),
            ValueError,
            "`cotangent` must have the structure of the output, with `None` for leaves "
            "that are not differentiated. At `cotangent` there must be a dict with "
            "the keys ['a']; got a dict with the keys ['b']",
        ),
        (
            lambda: eqx.filter_jvp(jnp.sin, (X,), ((X, X),)),
            ValueError,
            "`tangents` must have the structure of the primals, with `None` for leaves "
            "that are not differentiated. At `tangents[0]` there must be a leaf; got a "
            "tuple",
        ),
        (
            lambda: eqx.filter_jvp(loss, (MODEL, X[:2]), (WIDER, X[:2])),
            ValueError,
            "At `tangents[0]` the static fields must be use_bias=True, "
            "use_final_bias=True, in_size=2, out_size=2, width_size=4,",
        ),
    ],
)
def test_wrong_tree_is_named(call, error, text):
    with raises(error, text):
        call()


def test_pure_callback_without_an_array_is_refused():
    for described in (3,), jnp.float32, {"x": float}, X.dtype, ((3,), X.dtype):
        with raises(TypeError, "`result_shape_dtypes` describes no array"):
            eqx.filter_pure_callback(np.sin, X, result_shape_dtypes=described)


# Devices and other processes


MESH = jax.make_mesh((1,), ("x",))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: eqx.Layout(3), TypeError, "`mesh` of `Layout` must be a `jax."),
        (lambda: eqx.Layout("x"), ValueError, "is written as 'data=2,model=4'"),
        (lambda: eqx.Layout("x=0"), ValueError, "-1 for the rest; got 'x=0'"),
        (
            lambda: eqx.filter_shard_map(same, mesh="x", in_specs=P(), out_specs=P()),
            TypeError,
            "`mesh` of `filter_shard_map` must be a `jax.sharding.Mesh`",
        ),
        (
            lambda: eqx.Layout(MESH, [("weigth", P("x")), ("**", P())]).shardings(
                {"weight": X, "bias": X}
            ),
            ValueError,
            "The rule for 'weigth' matches nothing. The paths are `['bias']`",
        ),
        (
            lambda: eqx.Layout(MESH, [("**", P()), ("**.weight", P("x"))]).shardings(
                MODEL
            ),
            ValueError,
            "The rule for '**.weight' is never used",
        ),
        (
            lambda: eqx.filter_export(same, platforms="tpuu"),
            ValueError,
            "Did you mean 'tpu'?",
        ),
        (
            lambda: eqx.filter_jit(same).trace(X).lower(["cudda"]),
            ValueError,
            "`lowering_platforms` names the platform 'cudda'. Did you mean 'cuda'?",
        ),
        (lambda: eqx.deserialize_export("a"), TypeError, "`data` must be the bytes"),
        (lambda: eqx.deserialize_export(None), TypeError, "got None"),
        (
            lambda: eqx.filter_export(lambda x: eqx.error_if(x, x > 0, "positive"))(
                X[0]
            ),
            NotImplementedError,
            "such as `error_if` or by a callback, and another process does not have",
        ),
    ],
)
def test_wrong_mesh_rule_or_platform_is_named(call, error, text):
    with raises(error, text):
        call()


def test_one_platform_is_a_string():
    assert eqx.filter_export(same, platforms="tpu")(X).platforms == ("tpu",)
    lowered = eqx.filter_jit(same).trace(X).lower("tpu")
    with raises(ValueError, "was lowered for 'tpu', but this host"):
        lowered.compile()


def test_rules_may_come_from_a_generator_and_name_a_bias_that_is_none():
    layer = nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))
    rules = (rule for rule in [("bias", P()), ("*", P("x"))])
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    assert eqx.Layout(mesh, rules).shardings(layer).weight.spec == P("x")


def test_deleted_array_is_named_by_filter_shard():
    x = X + 1
    x.delete()
    with raises(eqx.DonationError, "`filter_shard`: `x['w']` (float32[3]) was donated"):
        eqx.filter_shard({"w": x}, jax.devices()[0])
