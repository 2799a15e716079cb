"""Each public function that reads a deleted array names the leaf, and who took it."""

import inspect
import io

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import equinox_like as eqx
from equinox_like import nn

X = jnp.ones(2)


@eqx.filter_jit(donate="arrays")
def taker(model):
    return jax.tree.map(lambda x: x + 1, model)


def linear():
    return nn.Linear(2, 2, key=jax.random.key(0))


def deleted():
    model = linear()
    taker(model)
    return model


def loss(m):
    return m(X).sum()


def custom_jvp(m):
    f = eqx.filter_custom_jvp(lambda m: m(X))
    f.def_jvp(lambda primals, tangents: (primals[0](X), tangents[0](X)))
    return f(m)


def custom_vjp(m):
    f = eqx.filter_custom_vjp(lambda m: m(X))
    f.def_fwd(lambda perturbed, m: (m(X), None))
    f.def_bwd(lambda residuals, grad, perturbed, m: m)
    return f(m)


def custom_vmap(m):
    f = eqx.filter_custom_vmap(lambda m: m(X))
    f.def_vmap(lambda size, batched, m: (m(X), False))
    return f(m)


def shard_map(m):
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Auto,))
    return eqx.filter_shard_map(
        lambda m: m.weight, mesh=mesh, in_specs=P(), out_specs=P()
    )(m)


STRUCT = jax.ShapeDtypeStruct((2, 2), "float32")
# The name of the leaf in the message, and the call.
CALLS = {
    "filter_jit": ("m", lambda m: eqx.filter_jit(loss)(m)),
    "filter_grad": ("m", lambda m: eqx.filter_grad(loss)(m)),
    "filter_value_and_grad": ("m", lambda m: eqx.filter_value_and_grad(loss)(m)),
    "filter_vmap": ("m", lambda m: eqx.filter_vmap(lambda m: m.weight + 1)(m)),
    "filter_pmap": ("m", lambda m: eqx.filter_pmap(loss, in_axes=None, axis_size=1)(m)),
    "filter_shard_map": ("m", shard_map),
    "filter_jvp": ("primals[0]", lambda m: eqx.filter_jvp(loss, (m,), (linear(),))),
    "filter_jvp of a tangent": (
        "tangents[0]",
        lambda m: eqx.filter_jvp(loss, (linear(),), (m,)),
    ),
    "filter_vjp": ("primals[0]", lambda m: eqx.filter_vjp(loss, m)),
    "filter_linearize": ("primals[0]", lambda m: eqx.filter_linearize(loss, m)),
    "filter_jacfwd": ("m", lambda m: eqx.filter_jacfwd(loss)(m)),
    "filter_jacrev": ("m", lambda m: eqx.filter_jacrev(loss)(m)),
    "filter_hessian": ("m", lambda m: eqx.filter_hessian(loss)(m)),
    "filter_checkpoint": ("m", lambda m: eqx.filter_checkpoint(loss)(m)),
    "filter_custom_jvp": ("m", custom_jvp),
    "filter_custom_vjp": ("m", custom_vjp),
    "filter_custom_vmap": ("m", custom_vmap),
    "filter_closure_convert": (
        "args[0]",
        lambda m: eqx.filter_closure_convert(loss, linear())(m),
    ),
    "filter_pure_callback": (
        "args[0]",
        lambda m: eqx.filter_pure_callback(
            lambda m: m.weight, m, result_shape_dtypes=STRUCT
        ),
    ),
    "filter_io_callback": (
        "args[0]",
        lambda m: eqx.filter_io_callback(
            lambda m: m.weight, m, result_shape_dtypes=STRUCT
        ),
    ),
    "filter_while_loop": (
        "init",
        lambda m: eqx.filter_while_loop(lambda c: loss(c) < 0, lambda c: c, m),
    ),
    "filter_fori_loop": (
        "init",
        lambda m: eqx.filter_fori_loop(0, 2, lambda i, c: c, m),
    ),
    "filter_scan": ("init", lambda m: eqx.filter_scan(lambda c, _: (c, 0), m, X)),
    "filter_map": ("xs", lambda m: eqx.filter_map(lambda m: m.weight, m)),
    "filter_cond": ("args[0]", lambda m: eqx.filter_cond(X[0] > 0, loss, loss, m)),
    "filter_switch": (
        "args[0]",
        lambda m: eqx.filter_switch(jnp.array(0), [loss, loss], m),
    ),
    "filter_shard": ("x", lambda m: eqx.filter_shard(m, jax.devices()[0])),
    "filter_device_put": ("tree", lambda m: eqx.filter_device_put(m)),
    "tree_copy": ("pytree", lambda m: eqx.tree_copy(m)),
    "tree_equal": ("pytrees[1]", lambda m: eqx.tree_equal(linear(), m)),
    "tree_at": (
        "pytree",
        lambda m: eqx.tree_at("weight", m, replace_fn=lambda w: w + 1),
    ),
    "apply_updates": ("updates", lambda m: eqx.apply_updates(linear(), m)),
    "apply_updates to it": ("model", lambda m: eqx.apply_updates(m, linear())),
    "save": ("tree", lambda m: eqx.save(io.BytesIO(), m)),
    "tree_serialise_leaves": (
        "pytree",
        lambda m: eqx.tree_serialise_leaves(io.BytesIO(), m),
    ),
    "EMA": ("pytree", lambda m: nn.EMA(m)),
    "EMA.update": ("model", lambda m: nn.EMA(linear()).update(m)),
    "DynamicLossScale": ("grads", lambda m: nn.DynamicLossScale().unscale(m)),
}
# These do not run what they are given, or read no array.
NOTHING_READ = {
    "filter",
    "filter_eval_shape",
    "filter_make_jaxpr",
    "filter_invertible",  # takes its arrays as one of the calls above
    "filter_export",
}


@pytest.mark.parametrize("name", CALLS)
def test_deleted_array_is_named_with_the_function_that_took_it(name):
    path, call = CALLS[name]
    for _ in range(2):
        with pytest.raises(eqx.DonationError) as caught:
            call(deleted())
        text = str(caught.value)
        assert f"`{path}." in text and "donated to `taker`" in text


def test_comparison_by_an_operator_names_its_side():
    other = linear()
    for compare, side in (
        (lambda m: m == other, "left"),
        (lambda m: other == m, "right"),
        (lambda m: m != other, "left"),
        (lambda m: [m] == [other], "left"),
    ):
        with pytest.raises(eqx.DonationError) as caught:
            compare(deleted())
        assert str(caught.value) == (
            f"`{side}.weight` (float32[2,2]) and 1 more array have been deleted: "
            f"`{side}.weight` was donated to `taker`. Use the tree that `taker` returned. "
            "To keep the old one, pass `eqx.tree_copy(tree)`."
        )


def test_only_names_that_the_user_chose_are_called_what_was_returned():
    fixes = {
        "tree_equal": "tree",
        "save": "tree",
        "filter_scan": "tree",
        "tree_at": "tree",
    }
    fixes |= {"filter_grad": "`m`", "filter_jit": "`m`"}
    for name, tree in fixes.items():
        with pytest.raises(eqx.DonationError) as caught:
            CALLS[name][1](deleted())
        assert f"Use the {tree} that `taker` returned" in str(caught.value)


@pytest.mark.parametrize("name", ["filter_grad", "filter_vmap", "tree_equal", "save"])
def test_function_that_failed_is_named(name):
    @eqx.filter_jit(donate="arrays")
    def failing(model):
        return eqx.error_if(taker.__wrapped__(model), model.bias[0] < 9, "too small")

    model = linear()
    with pytest.raises(eqx.EquinoxRuntimeError, match="too small"):
        failing(model)
    with pytest.raises(eqx.DonationError, match=r"donated to `\S*failing`"):
        CALLS[name][1](model)


def test_each_transformation_is_among_these():
    public = {n for n in dir(eqx) if n.startswith("filter") and n != "filter_closure"}
    functions = {n for n in public if inspect.isfunction(getattr(eqx, n))}
    assert functions <= CALLS.keys() | NOTHING_READ


def test_error_without_a_deleted_argument_is_left_as_it_is():
    weight, x = deleted().weight, jnp.ones(())
    with pytest.raises((RuntimeError, ValueError)) as caught:
        eqx.filter_grad(lambda x: x * weight.sum())(x)
    assert not isinstance(caught.value, eqx.DonationError)

    def fails(x):
        raise RuntimeError("the user has been deleted")

    with pytest.raises(RuntimeError, match="the user"):
        eqx.filter_grad(fails)(x)


@pytest.mark.parametrize("show", [repr, str, eqx.tree_pformat])
def test_deleted_arrays_are_shown_as_such(show):
    assert "weight=f32[2,2]," in show(linear())
    text = show(deleted())
    assert "weight=f32[2,2](deleted)" in text and "bias=f32[2](deleted)" in text


SHARING = [
    eqx.apply_updates,
    eqx.combine,
    eqx.filter,
    eqx.filter_shard,
    eqx.frozen,
    eqx.internal.merge,
    eqx.partition,
    eqx.internal.split,
    eqx.state_dict,
    eqx.tree_at,
    eqx.tree_inference,
    eqx.unfrozen,
    nn.Shared,
    nn.add_lora,
    nn.delete_init_state,
    nn.merge_lora,
    nn.mixed,
]


@pytest.mark.parametrize("function", SHARING, ids=lambda f: f.__name__)
def test_function_that_shares_arrays_says_so(function):
    assert "hares arrays with" in function.__doc__ and "tree_copy" in function.__doc__
