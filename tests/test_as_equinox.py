"""Each test runs in a process of its own: what `as_equinox` does lasts as long as that."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import equinox_like

ROOT = str(Path(equinox_like.__file__).parent.parent)


def run(code: str, *arguments: str, path: str = "") -> str:
    command = [sys.executable, *(arguments or ("-c", textwrap.dedent(code)))]
    paths = [path, ROOT] if path else [ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_every_public_name_is_the_one_of_this_library():
    out = run("""
        import equinox_like.as_equinox
        import equinox as eqx
        import equinox.debug
        import equinox.internal as eqxi
        import equinox.nn as nn
        import equinox_like
        from equinox import Module, filter_jit
        from equinox.internal import noinline
        from equinox.nn import Linear

        changed = {"nn", "debug", "internal"}
        changed |= {"tree_serialise_leaves", "tree_deserialise_leaves"}
        for theirs, ours in (
            (eqx, equinox_like),
            (nn, equinox_like.nn),
            (eqxi, equinox_like.internal),
            (equinox.debug, equinox_like.debug),
        ):
            for name in dir(ours):
                if not name.startswith("_") and name not in changed:
                    assert getattr(theirs, name) is getattr(ours, name), name
        assert Module is equinox_like.Module and Linear is equinox_like.nn.Linear
        print("passed")
    """)
    assert out == "passed\n", out


def test_names_that_only_equinox_has():
    out = run("""
        import warnings
        import equinox_like.as_equinox
        import equinox as eqx
        import jax

        for spelling in ("force_abstract", "force_abstact"):
            config = eqx.StrictConfig(**{spelling: True}, allow_method_override=True)

            class Abstract(eqx.Module, strict=config):
                pass

            class Concrete(Abstract, strict=True):
                pass

            Concrete()
            try:
                Abstract()
            except TypeError as error:
                assert "abstract" in str(error)
            else:
                raise AssertionError
        with warnings.catch_warnings(record=True) as caught:

            class Named(eqx.Module):
                name: str = eqx.static_field(default="first")

        assert "deprecated: write `field(static=True" in str(caught[0].message)
        assert caught[0].filename == "<string>"
        assert Named().name == "first" and not jax.tree.leaves(Named())
        print("passed")
    """)
    assert out == "passed\n", out


def test_files_have_the_records_of_the_leaves_alone(tmp_path):
    out = run(f"""
        import io, pathlib
        import equinox_like
        import equinox_like.as_equinox
        import equinox as eqx
        import jax.numpy as jnp

        folder = pathlib.Path({str(tmp_path)!r})
        tree = {{"w": jnp.arange(3.0), "n": 2, "f": jnp.sin}}
        expected = io.BytesIO()
        equinox_like.tree_serialise_leaves(expected, tree)
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, tree)
        eqx.tree_serialise_leaves(path_or_file=folder / "tree", pytree=tree)
        written = folder / "tree.eqx"
        assert file.getvalue() == expected.getvalue() == written.read_bytes()
        print(eqx.tree_deserialise_leaves(written, tree)["w"])
        # jinns loads a part of what it saved, under another name.
        print(eqx.tree_deserialise_leaves(like=[0], path_or_file=folder / "tree"))

        # The old file stays if a leaf cannot be written.
        spec = [eqx.default_serialise_filter_spec, lambda file, leaf: 1 / 0]
        try:
            eqx.tree_serialise_leaves(written, [jnp.ones(2), jnp.ones(2)], spec)
        except RuntimeError as error:
            print(error)
        assert written.read_bytes() == expected.getvalue()
    """)
    assert out == "[0. 1. 2.]\n[2]\nError at leaf with path [1]: division by zero\n", (
        out
    )


def test_metadata_report_the_version_of_equinox():
    out = run("""
        import equinox_like.as_equinox
        import equinox
        from importlib.metadata import version

        print(version("equinox"), equinox.__version__)
    """)
    assert out == "0.13.8 0.13.8\n", out


def test_genuine_equinox_that_is_there_already_is_an_error(tmp_path):
    (tmp_path / "equinox.py").touch()
    out = run("import equinox; import equinox_like.as_equinox", path=str(tmp_path))
    assert "Equinox itself has been imported already" in out and str(tmp_path) in out


def test_nothing_is_shadowed_without_the_import(tmp_path):
    (tmp_path / "equinox.py").write_text("print('genuine')")
    assert run("import equinox_like, equinox", path=str(tmp_path)) == "genuine\n"


@pytest.mark.parametrize("on_request", [True, False])
def test_child_processes_follow_on_request(tmp_path, on_request):
    (tmp_path / "equinox.py").write_text("print('genuine')")
    out = run(
        f"""
        import subprocess, sys
        from equinox_like import as_equinox
        if {on_request}:
            as_equinox.for_child_processes()
            as_equinox.for_child_processes()
        code = "import equinox; print(getattr(equinox, 'Module', None))"
        subprocess.run([sys.executable, "-c", code], check=True)
        """,
        path=str(tmp_path),
    )
    ours = "<class 'equinox_like._module.module.Module'>\n"
    assert out == (ours if on_request else "genuine\nNone\n")


@pytest.mark.parametrize("kind", ["script", "module"])
def test_scripts_and_modules_run_with_their_arguments(tmp_path, kind):
    (tmp_path / "beside_it.py").write_text("x = 1")
    script = tmp_path / "my_script.py"
    script.write_text(
        "import sys, equinox, beside_it\n"
        "print(__name__, equinox.Module.__module__, sys.argv[1:])\n"
    )
    start = ["-m", "equinox_like.as_equinox"]
    if kind == "script":
        out = run("", *start, str(script), "a", "-b")
    else:
        out = run("", *start, "-m", "my_script", "a", "-b", path=str(tmp_path))
    assert out == "__main__ equinox_like._module.module ['a', '-b']\n"


def test_private_names_that_libraries_use():
    out = run("""
        import equinox_like.as_equinox
        import equinox as eqx
        from equinox._module._module import _currently_initialising, is_abstract_module

        class Meta(eqx._module._module._ModuleMeta):
            def __call__(cls, *args):
                self = cls.__new__(cls, *args)
                _currently_initialising.add(self)
                try:
                    cls.__init__(self, *args)
                finally:
                    _currently_initialising.remove(self)
                return self

        class A(eqx.Module, metaclass=Meta):
            x: int

            def __init__(self, x):
                self.x = 2 * x

        class B(eqx.Module):
            x: eqx.AbstractVar[int]

        a = A(1)
        assert a.x == 2 and not is_abstract_module(A) and is_abstract_module(B)
        try:
            a.x = 3
        except AttributeError:
            print("frozen")
    """)
    assert out == "frozen\n", out


def test_metaclass_that_wraps_a_generated_init():
    """As that of galax, which converts arguments before `__init__`."""
    out = run("""
        import equinox_like.as_equinox
        import equinox as eqx
        from equinox._module._module import _has_dataclass_init, _ModuleMeta

        class Meta(_ModuleMeta):
            def __new__(mcs, *args, **kwargs):
                cls = super().__new__(mcs, *args, **kwargs)
                if _has_dataclass_init[cls]:
                    init = cls.__init__
                    cls.__init__ = lambda self, *args: init(self, *map(int, args))
                return cls

        class A(eqx.Module, metaclass=Meta):
            x: int

        class B(A):
            y: int

        class C(B):
            def __init__(self, x):
                self.x = self.y = x

        class D(C):
            pass

        print(A(1.5), B(1.5, 2.5), C(1.5), D(1.5))
        classes = eqx.Module, A, B, C, D, eqx.nn.Linear
        print(*[_has_dataclass_init[cls] for cls in classes])
    """)
    assert out == (
        "A(x=1) B(x=1, y=2) C(x=1.5, y=1.5) D(x=1.5, y=1.5)\n"
        "True True True False False False\n"
    )


def test_an_array_type_with_omega():
    """As that of dynamiqs, which is passed to `**` with the class `ω`."""
    out = run("""
        import equinox_like.as_equinox
        from equinox.internal import ω
        from equinox.internal._omega import _Metaω

        class Array:
            def __pow__(self, other):
                return ω(2) if isinstance(other, _Metaω) else NotImplemented

        print((Array()**ω + 1).ω)
    """)
    assert out == "3\n"


def test_the_loop_that_astronomix_imports():
    out = run("""
        import equinox_like.as_equinox
        import jax
        from equinox.internal._loop.checkpointed import checkpointed_while_loop

        def power(x):
            init = 0, x
            step = lambda c: (c[0] + 1, c[1] * x)
            return checkpointed_while_loop(lambda c: c[0] < 3, step, init, checkpoints=2)[1]

        print(power(2.0), jax.grad(power)(2.0))
    """)
    assert out == "16.0 32.0\n"


def test_private_modules_that_published_code_imports():
    out = run("""
        import equinox_like.as_equinox
        import equinox as eqx
        import equinox_like
        from equinox_like import internal, nn
        from equinox._misc import currently_jitting, default_floating_dtype
        from equinox._misc import left_broadcast_to
        from equinox._module import field, Module, Static, Partial, static_field
        from equinox._custom_types import sentinel
        from equinox._doc_utils import doc_repr
        from equinox._filters import combine, filter, is_array, partition
        from equinox._tree import tree_at, tree_equal
        from equinox._vmap_pmap import filter_pmap, filter_vmap, if_array
        from equinox.internal._loop.bounded import bounded_while_loop
        from equinox.nn._attention import dot_product_attention, MultiheadAttention
        from equinox.nn._attention import dot_product_attention_weights
        from equinox.nn._dropout import Dropout
        from equinox.nn._linear import Identity, Linear
        from equinox.nn._misc import default_init
        from equinox.nn._stateful import State, StateIndex, make_with_state
        import equinox.nn._linear as linear
        import jax, jax.numpy as jnp

        here = globals().copy()
        names = "field Module Partial combine filter is_array partition tree_at "
        names += "tree_equal filter_pmap filter_vmap if_array"
        for name in names.split():
            assert here[name] is getattr(equinox_like, name), name
        for name in ("Static", "doc_repr", "left_broadcast_to"):
            assert here[name] is getattr(internal, name), name
        names = "dot_product_attention MultiheadAttention Dropout Identity Linear State"
        for name in f"{names} StateIndex make_with_state".split():
            assert here[name] is getattr(nn, name), name
        assert linear is eqx.nn._linear and linear.Linear is Linear
        assert static_field is eqx.static_field
        assert eqx._module._module._ModuleMeta is type(Module)

        # quax copies the names of a private module to a module of its own, but for one.
        from equinox._module import _module

        assert "is_abstract_module" in vars(_module) and "Module" in vars(_module)

        # What is not public here.
        twice = eqx.filter_jit(sentinel, donate="none")(lambda x: 2 * x)
        assert twice(1) == 2 and default_floating_dtype() == jnp.float32
        assert (currently_jitting(), jax.jit(currently_jitting)()) == (False, True)
        key = jax.random.key(0)
        weight = default_init(key, (3, 2), jnp.float32, 0.5)
        assert (weight == jax.random.uniform(key, (3, 2), minval=-0.5, maxval=0.5)).all()
        step = lambda x: 2 * x
        f = lambda x: bounded_while_loop(lambda x: x < 9, step, x, max_steps=16)
        assert f(1.0) == 16 and jax.grad(f)(1.0) == 16
        ones = jnp.ones((3, 4))
        assert jnp.allclose(dot_product_attention_weights(ones, ones), 1 / 3)
        print("passed")
    """)
    assert out == "passed\n", out


def test_other_private_names_are_answered_with_the_public_one():
    out = run("""
        import importlib, importlib.util
        import equinox_like.as_equinox
        import equinox

        def error_of(code):
            try:
                exec(code, globals().copy())
            except Exception as error:
                assert "pickle" not in str(error)
                return error
            raise AssertionError(code)

        for code, answer in (
            ("from equinox._jit import filter_jit", "from equinox import filter_jit"),
            ("from equinox.nn._conv import Conv, _x", "from equinox.nn import Conv"),
            ("from equinox.internal._onnx import to_onnx", "from equinox import to_onnx"),
            (
                "from equinox.internal._nontraceable import nontraceable, nonbatchable",
                "from equinox.internal import nontraceable`, "
                "`from equinox.internal import nonbatchable",
            ),
        ):
            error = error_of(code)
            assert type(error) is ModuleNotFoundError and error.name == code.split()[1]
            assert f"Write `{answer}`." in str(error), error
        for code in (
            "import equinox._jit",
            "import equinox.nn._conv as conv",
            "from equinox.nn._conv import *",
            "from equinox.nn._conv import _ntuple",
            "import equinox._misc.deeper",
            "importlib.import_module('equinox._jit')",
            "importlib.util.find_spec('equinox._jit')",
            "equinox._jit",
            "equinox.nn._conv",
            "equinox._misc.nothing",
            "vars(equinox._misc)['__getattr__']('_hidden')",
            "equinox._misc._nothing",
        ):
            error = error_of(code)
            assert isinstance(error, ModuleNotFoundError | AttributeError)
            assert "`from equinox import ...`, `from equinox.nn import" in str(error)
        error = error_of("from equinox._misc import nothing")
        assert type(error) is ImportError
        assert importlib.util.find_spec("equinoxes") is None
        print("passed")
    """)
    assert out == "passed\n", out


def test_pickle_made_with_equinox_says_what_to_do():
    out = run("""
        import pickle
        import equinox_like.as_equinox

        def make(module, name):
            return f"c{module}\\n{name}\\n.".encode()

        for module in ("equinox.nn._conv", "equinox._module._prebuilt", "equinox._jit"):
            # In C, and in Python.
            for loads in (pickle.loads, pickle._loads):
                try:
                    loads(make(module, "Linear"))
                except ModuleNotFoundError as error:
                    assert error.name == module and str(error).startswith(
                        f"No module named {module!r}"
                    )
                    assert "`equinox.tree_serialise_leaves`" in str(error)
                    assert "`tree_deserialise_leaves`" in str(error)
                else:
                    raise AssertionError(module)
        # What an importer of an optional module relies on.
        try:
            import equinox.nn._unknown
        except ImportError:
            print("passed")
    """)
    assert out == "passed\n", out


def test_pytest_names_parameters_as_with_equinox(tmp_path):
    """By their type, as a Module has no `__name__`."""
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import equinox as eqx, jax, pytest

        class Call(eqx.Module):
            def __call__(self): ...

        each = Call(), eqx.nn.Identity(), eqx.nn.Lambda(len), len, Call

        @pytest.mark.parametrize("x", each)
        def test_it(x): ...
        """)
    )
    arguments = "-m", "equinox_like.as_equinox", "-m", "pytest", "--collect-only", "-q"
    out = run("", *arguments, "-p", "no:cacheprovider", str(tmp_path))
    names = [line.partition("::")[2] for line in out.splitlines() if "::" in line]
    shown = ["x0", "x1", "x2", "len", "Call"]
    assert names == [f"test_it[{name}]" for name in shown], out


def test_unknown_private_name_is_an_attribute_error():
    out = run("""
        import equinox_like.as_equinox
        import equinox

        assert not hasattr(equinox, "_unknown") and not hasattr(equinox.nn, "_unknown")
        print("passed")
    """)
    assert out == "passed\n", out
