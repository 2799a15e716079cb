"""in_shardings and out_shardings of filter_jit, under meshes of each kind of axes."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import equinox_like as eqx

MESHES = {
    kind.name: jax.make_mesh((4,), ("d",), axis_types=(kind,))
    for kind in (AxisType.Auto, AxisType.Explicit)
}
X = np.arange(8, dtype=np.float32)


@pytest.fixture(params=MESHES)
def mesh(request):
    return MESHES[request.param]


@pytest.fixture
def split(mesh):
    return NamedSharding(mesh, P("d"))


@pytest.fixture
def whole(mesh):
    return NamedSharding(mesh, P())


class Model(eqx.Module):
    weight: Any
    bias: Any
    activation: Any = jnp.tanh
    size: int = eqx.field(static=True, default=3)

    def __call__(self, x):
        return self.activation(self.weight * x + self.bias)


def model():
    return Model(X, X)


def is_split(x) -> bool:
    return x.sharding.shard_shape(x.shape) != x.shape


def both(model, x, *, scale=1.0):
    return model, x * scale


def module_level(x):
    return 2 * x


def memories(sharding):
    return [sharding.with_memory_kind(m) for m in ("pinned_host", "unpinned_host")]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2),
    reason="jax 0.10.0 compiles nothing that is in the memory of the host for CPUs",
)
class TestMemory:
    """What JAX ignores is done, or is an error that names the argument."""

    @pytest.mark.parametrize("late", [False, True])
    def test_argument_on_the_host_is_traced_once_as_such(self, split, late):
        for sharding in (split, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
            x = jax.device_put(X, sharding.with_memory_kind("pinned_host"))
            spaces = []

            def f(x, spaces=spaces):
                spaces.append(jax.typeof(x).memory_space)
                return x

            if late:
                # From here on, traces are searched for checks.
                eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "negative"))(X)
            for options in ({}, {"in_shardings": x.sharding}, {"donate": "warn"}):
                out = eqx.filter_jit(f, **options)(x)
                assert out.sharding.memory_kind == "pinned_host"
            assert spaces == [jax.memory.Space.Host] * 3

    def test_array_in_another_memory_than_its_in_sharding_is_refused(self, split):
        host = split.with_memory_kind("pinned_host")
        on_host = eqx.filter_jit(lambda x: x, in_shardings=(host,))
        assert on_host(jax.device_put(X, host)).sharding.memory_kind == "pinned_host"
        refused = (
            r"`x` \(float32\[8\]\), which is in the memory '%s'.*`filter_device_put`"
        )
        for x in (X, jnp.asarray(X), jax.device_put(X, split)):
            with pytest.raises(ValueError, match=refused % "device"):
                on_host(x)
        with pytest.raises(ValueError, match=refused % "device"):
            jax.jit(on_host)(jnp.asarray(X))
        on_device = eqx.filter_jit(lambda x: x, in_shardings=split)
        with pytest.raises(ValueError, match=refused % "pinned_host"):
            on_device(jax.device_put(X, host))

    def test_output_goes_to_the_memory_of_its_sharding(self):
        single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for split in (NamedSharding(MESHES["Auto"], P("d")), single):
            host, unpinned = memories(split)
            f = eqx.filter_jit(lambda x: 2 * x, out_shardings=host)
            for out in (f(X), jax.jit(f)(X), eqx.filter_jit(f)(X)):
                assert out.sharding.is_equivalent_to(host, 1)
                np.testing.assert_array_equal(np.asarray(out), 2 * X)
            f = eqx.filter_jit(lambda x: 2 * x, out_shardings=unpinned)
            assert f(X).sharding.memory_kind == "unpinned_host"


class TestInputs:
    def test_one_sharding_is_for_all_arrays(self, split):
        out = eqx.filter_jit(both, in_shardings=split)(model(), X)
        assert all(map(is_split, (out[0].weight, out[0].bias, out[1])))
        assert out[0].activation is jnp.tanh

    def test_tuple_is_for_the_positional_arguments(self, split, whole):
        f = eqx.filter_jit(both, in_shardings=(whole, split))
        for out in (f(model(), X), f(x=X, model=model()), f(model(), X, scale=2.0)):
            assert not is_split(out[0].weight) and is_split(out[1])

    def test_tuple_is_also_for_what_comes_by_keyword_after_one_left_out(self, split):
        f = eqx.filter_jit(
            lambda a=None, b=None, *, c: (b, c), in_shardings=(None, split)
        )
        b, c = f(b=X, c=X)
        assert is_split(b) and not is_split(c)

    def test_modules_of_shardings_are_prefixes(self, split, whole):
        spec = Model(split, whole, activation=None)
        out, _ = eqx.filter_jit(both, in_shardings=(spec, None))(model(), X)
        assert is_split(out.weight) and not is_split(out.bias)

    def test_what_faces_a_leaf_that_is_no_array_is_skipped(self, split):
        spec = jax.tree.map(lambda x: split if eqx.is_array(x) else x, model())
        assert spec.activation is jnp.tanh
        out, _ = eqx.filter_jit(both, in_shardings=(spec, None))(model(), X)
        assert is_split(out.weight)

    def test_node_that_takes_arrays_only_may_have_one_sharding(self, split):
        @jax.tree_util.register_pytree_node_class
        class Picky:
            def __init__(self, x):
                self.x = x.astype("float32")

            def tree_flatten(self):
                return (self.x,), None

            @classmethod
            def tree_unflatten(cls, _, children):
                return cls(*children)

        f = eqx.filter_jit(lambda picky, k: picky.x, in_shardings=(split,))
        assert is_split(f(Picky(X), 2))

    def test_arrays_of_the_callable_are_no_arguments(self, split):
        f = eqx.filter_jit(Model(jnp.ones(()), jnp.ones(())), in_shardings=split)
        assert is_split(f(X))

    def test_methods_take_self_first(self, split, whole):
        class Scaled(Model):
            @functools.partial(eqx.filter_jit, in_shardings=(split, None))
            def f(self, x):
                return self.weight, x

        weight, x = Scaled(X, X).f(X)
        assert is_split(weight) and not is_split(x)

    def test_partition_specs_are_for_the_mesh_in_use(self, mesh):
        f = eqx.filter_jit(
            both, in_shardings=(None, P("d")), out_shardings=(P("d"), P())
        )
        with jax.set_mesh(mesh):
            out, x = f(model(), X)
        assert is_split(out.weight) and not is_split(x)


class TestOutputs:
    def test_one_sharding_is_for_all_arrays(self, split):
        out, x = eqx.filter_jit(both, out_shardings=split)(model(), X)
        assert is_split(out.weight) and is_split(out.bias) and is_split(x)
        assert out.activation is jnp.tanh

    def test_prefix_trees_reach_into_modules(self, split, whole):
        spec = (Model(split, whole, activation=None), split)
        out, x = eqx.filter_jit(both, out_shardings=spec)(model(), X)
        assert isinstance(out, Model) and out.activation is jnp.tanh
        assert is_split(out.weight) and not is_split(out.bias) and is_split(x)
        assert x.tolist() == out.weight.tolist() == X.tolist()

    def test_arrays_that_are_left_to_jax_are_untouched(self):
        out, x = eqx.filter_jit(both, out_shardings=(None, None))(model(), X)
        assert x.tolist() == X.tolist() and out.activation is jnp.tanh

    def test_the_function_is_traced_once(self, split):
        traces = []

        @functools.partial(
            eqx.filter_jit,
            in_shardings=(split, None),
            out_shardings=(split, split, "no array"),
        )
        def f(x, k=1):
            traces.append(k)
            return x, 2 * x, k

        for _ in range(3):
            f(X)
            f(X, k=2)
        assert traces == [1, 2]


class TestErrors:
    def test_size_that_cannot_be_split_is_named(self, split):
        f = eqx.filter_jit(lambda x: x, in_shardings=(split,))
        message = r"`x\['a'\]` \(float32\[6\]\), whose dimension 0 has size 6 .* 4 dev"
        with pytest.raises(ValueError, match="`in_shardings`.*" + message):
            f({"a": X[:6]})
        f = eqx.filter_jit(lambda x: x, out_shardings={"a": split})
        message = r"`out_shardings`.*`out\['a'\]` \(float32\[6\]\), whose dimension 0"
        with pytest.raises(ValueError, match=message):
            f({"a": X[:6]})

    def test_array_of_too_few_dimensions_is_named(self, mesh):
        f = eqx.filter_jit(both, in_shardings=(NamedSharding(mesh, P(None, "d")), None))
        with pytest.raises(ValueError, match=r"`model\.weight`.* has 1 dimension\."):
            f(model(), X)

    def test_array_that_is_elsewhere_is_named(self, split, whole):
        x = jax.device_put(X, whole)
        with pytest.raises(
            ValueError, match=r"`model\.bias` \(float32\[8\]\) is sharded"
        ):
            eqx.filter_jit(both, in_shardings=(split, None))(Model(X, x), X)

    def test_partition_spec_needs_a_mesh(self):
        with pytest.raises(RuntimeError, match=r"jax.set_mesh"):
            eqx.filter_jit(both, in_shardings=(None, P("d")))(model(), X)
        with pytest.raises(RuntimeError, match=r"jax.set_mesh"):
            eqx.filter_jit(both, out_shardings=P("d"))(model(), X)

    def test_other_things_are_refused_by_the_path_they_are_for(self):
        with pytest.raises(ValueError, match=r"gives 3 for `model\.weight`"):
            eqx.filter_jit(both, in_shardings=(3, None))(model(), X)
        with pytest.raises(ValueError, match=r"gives <function .* for `x`: it must be"):
            eqx.filter_jit(both, in_shardings=(None, lambda x: P("d")))(model(), X)
        with pytest.raises(ValueError, match=r"gives 3 for `out\[1\]`"):
            eqx.filter_jit(both, out_shardings=(None, 3))(model(), X)

    def test_tree_that_is_no_prefix_is_refused_by_the_argument(self, split):
        with pytest.raises(ValueError, match="`in_shardings` must be a prefix of `x`"):
            eqx.filter_jit(both, in_shardings=(None, {"b": split}))(model(), {"a": X})
        with pytest.raises(
            ValueError, match="`out_shardings` must be a prefix of `out`"
        ):
            eqx.filter_jit(both, out_shardings=(split,))(model(), X)

    def test_mistakes_are_found_when_wrapping_where_they_can_be(self, split):
        with pytest.raises(
            ValueError, match="for each positional argument; got a dict"
        ):
            eqx.filter_jit(both, in_shardings={"x": split})
        with pytest.raises(ValueError, match="3 entries, but `both` takes 2"):
            eqx.filter_jit(both, in_shardings=(None, None, split))
        with pytest.raises(ValueError, match="got a Model"):
            eqx.filter_jit(both, in_shardings=Model(split, split))

    def test_positional_argument_without_an_entry_is_named(self, split):
        with pytest.raises(ValueError, match="gives 'no entry' for `x`"):
            eqx.filter_jit(both, in_shardings=(split,))(model(), X)


class TestNests:
    def test_compiled_functions_tell_their_shardings(self, split, whole):
        f = eqx.filter_jit(
            both, in_shardings=(split, whole), out_shardings=(whole, split)
        )
        compiled = f.lower(model(), X).compile()
        (model_in, x_in), rest = compiled.input_shardings
        assert model_in.weight == split and x_in == whole and rest == {}
        assert model_in.activation is None
        model_out, x_out = compiled.output_shardings
        assert model_out.bias.is_fully_replicated and model_out.activation is None
        assert not x_out.is_fully_replicated
        assert is_split(compiled(model(), X)[1])

    def test_donation_and_shardings_go_together(self, split):
        x = jax.device_put(X, split)
        f = eqx.filter_jit(
            lambda x: x + 1, donate="arrays", in_shardings=split, out_shardings=split
        )
        out = f(x)
        assert out.tolist() == (X + 1).tolist() and x.is_deleted() and is_split(out)

    def test_under_jit_vmap_and_grad(self, mesh):
        with jax.set_mesh(mesh):
            f = eqx.filter_jit(
                lambda x, k: (x**k, k),
                in_shardings=P("d"),
                out_shardings=(P("d"), None),
            )
            x = jax.device_put(X, P("d"))
            assert jax.jit(lambda x: f(x, 2)[0])(x).tolist() == (X**2).tolist()
            grads = jax.jit(jax.grad(lambda x: f(x, 2)[0].sum()))(x)
            assert grads.tolist() == (2 * X).tolist()
            xs = jax.device_put(np.stack([X, X]), P(None, "d"))
            assert jax.vmap(lambda x: f(x, 2)[0])(xs).shape == (2, 8)

    def test_inside_shard_map(self, mesh):
        f = eqx.filter_jit(lambda x, k: (x * k, k))
        with jax.set_mesh(mesh):
            mapped = jax.shard_map(
                lambda x: f(x, 2)[0], in_specs=P("d"), out_specs=P("d")
            )
            assert mapped(jax.device_put(X, P("d"))).tolist() == (2 * X).tolist()

    def test_equal_shardings_share_what_is_compiled(self, split):
        first, second = (
            eqx.filter_jit(module_level, in_shardings=([split],)) for _ in range(2)
        )
        assert first == second and first._program is second._program
        assert first != eqx.filter_jit(module_level)

    def test_wrapper_can_be_pickled(self):
        f = eqx.filter_jit(module_level, in_shardings=(P(),))
        assert pickle.loads(pickle.dumps(f)) == f

    def test_disable_jit_disregards_shardings(self, split):
        with jax.disable_jit():
            assert (
                eqx.filter_jit(both, out_shardings=(None, split))(model(), X)[1][1] == 1
            )
