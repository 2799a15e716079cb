"""The package as a whole: its names, and what importing it does and does not do."""

import compileall
import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import pickle
import pkgutil
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from test_docs import public_objects

import equinox_like as eqx
from equinox_like import _errors

ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_starts_no_backend_and_loads_neither_layers_nor_the_printer():
    out = run(
        "import sys, equinox_like\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
        "print('equinox_like.nn' in sys.modules, 'wadler_lindig' in sys.modules)\n"
    )
    assert out.split() == ["False", "False", "False"]


def test_importing_loads_no_package_that_jax_and_jaxtyping_do_not_load():
    code = """
import sys, jax, jaxtyping
before = {name.partition(".")[0] for name in sys.modules}
import equinox_like
after = {name.partition(".")[0] for name in sys.modules}
print(after - before - set(sys.stdlib_module_names))
"""
    assert run(code) == "{'equinox_like'}\n"


def test_layers_load_when_they_are_first_asked_for():
    assert (
        run("import equinox_like as eqx; print(eqx.nn.Linear.__name__)") == "Linear\n"
    )
    assert run("from equinox_like import nn; print(nn.MLP.__name__)") == "MLP\n"
    assert run("import equinox_like.nn as nn; print(nn.MLP.__name__)") == "MLP\n"
    assert "nn" in dir(eqx)


def test_names_of_late_files_are_real_names_of_the_package():
    code = """
import sys, equinox_like as eqx
assert "equinox_like._transforms.jvp_vjp" not in sys.modules
from equinox_like import filter_vjp
assert filter_vjp is eqx.filter_vjp and "save" in vars(eqx)
assert "load" in dir(eqx)
"""
    assert run(code) == ""


def test_what_is_loaded_late_leaves_what_is_compiled():
    # JAX compiles everything again once a context was made after the import.
    code = """
import equinox_like as eqx, jax
traced = []
f = jax.jit(lambda x: traced.append(x) or x)
f(0.0)
eqx.save, eqx.nn.Linear, eqx.debug.store_dce, eqx.internal.noinline
f(0.0)
print(len(traced))
"""
    assert run(code) == "1\n"


def test_description_for_a_package_index_has_no_links_to_files():
    description = importlib.metadata.metadata("equinox_like")["Description"]
    assert (
        "# equinox_like" in description and "`docs/getting-started.md`" in description
    )
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert links and all(link.startswith("https://") for link in links)


HOME = "https://example.org/owner/equinox_like"


def run_in(folder, *command):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_repository(folder, remote):
    run_in(folder, "git", "init", "-q")
    run_in(folder, "git", "remote", "add", "origin", remote)


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://example.org/owner/equinox_like.git", HOME),
        ("https://example.org/owner/equinox_like/", HOME),
        ("https://name:token@example.org/owner/equinox_like", HOME),
        ("git@example.org:owner/equinox_like.git", HOME),
        ("ssh://git@example.org:2222/owner/equinox_like.git", HOME),
        ("/home/name/equinox_like", None),
        ("file:///home/name/equinox_like", None),
    ],
)
def test_address_for_a_browser_of_a_clone(tmp_path, remote, expected):
    address = runpy.run_path(str(ROOT / "scripts" / "project_urls.py"))["address"]
    make_repository(tmp_path, remote)
    assert address(tmp_path) == expected
    run_in(tmp_path, "git", "remote", "remove", "origin")
    assert address(tmp_path) is None


def test_metadata_names_the_repository_of_a_clone(tmp_path):
    project = tmp_path / "project"
    for name in [
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "equinox_like/__init__.py",
        "scripts/project_urls.py",
    ]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    command = sys.executable, "-m", "hatchling", "metadata", "urls"
    make_repository(tmp_path, HOME)  # `project` is only a folder in it
    assert json.loads(run_in(project, *command)) == {}
    (tmp_path / ".git").rename(project / ".git")
    urls = json.loads(run_in(project, *command))
    assert urls == {"Source": HOME, "Issues": f"{HOME}/issues"}


def test_citation_has_the_version():
    assert f"\nversion: {eqx.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem
)
def test_forms_and_workflows_of_the_repository_are_valid(form):
    content = yaml.safe_load(form.read_text())
    if form.parent.name == "ISSUE_TEMPLATE" and form.stem != "config":
        assert content["name"] and content["description"]
        asked = [field["attributes"]["label"] for field in content["body"]]
        assert len(asked) >= 3
    if form.parent.name == "workflows":
        (job,) = content["jobs"].values()
        assert job["steps"][-1] == {"run": "bash .ci/run"}


def test_orbax_loads_when_it_is_asked_for_and_is_not_listed():
    code = """
import sys, equinox_like as eqx
assert "orbax" not in dir(eqx) and "orbax" not in sys.modules
print(eqx.orbax.Save.__name__)
assert "orbax" not in dir(eqx)
"""
    assert run(code) == "Save\n"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'equinox_like' has no attribute 'nope'"):
        eqx.nope  # noqa: B018


def test_public_names_are_these():
    # The tests' import hook brings `jaxtyping` into each file.
    names = [n for n in dir(eqx) if not n.startswith("_") and n != "jaxtyping"]
    assert names == [
        "AbstractClassVar",
        "AbstractVar",
        "Context",
        "DonationError",
        "DonationReport",
        "DonationWarning",
        "Enumeration",
        "EquinoxRuntimeError",
        "EquinoxTracetimeError",
        "Layout",
        "LayoutReport",
        "LeafError",
        "MissingKeyError",
        "Module",
        "NotAnArrayError",
        "NotInvertibleError",
        "Partial",
        "Retrace",
        "RetraceWarning",
        "Selection",
        "ShapeError",
        "apply_updates",
        "branched_error_if",
        "bucketed",
        "capture",
        "clear_caches",
        "combine",
        "constrain",
        "debug",
        "default_deserialise_filter_spec",
        "default_serialise_filter_spec",
        "deserialize_export",
        "error_if",
        "field",
        "filter",
        "filter_checkpoint",
        "filter_closure_convert",
        "filter_cond",
        "filter_custom_jvp",
        "filter_custom_vjp",
        "filter_custom_vmap",
        "filter_device_put",
        "filter_eval_shape",
        "filter_export",
        "filter_fori_loop",
        "filter_grad",
        "filter_hessian",
        "filter_invertible",
        "filter_io_callback",
        "filter_jacfwd",
        "filter_jacrev",
        "filter_jit",
        "filter_jvp",
        "filter_linearize",
        "filter_make_jaxpr",
        "filter_map",
        "filter_pmap",
        "filter_pure_callback",
        "filter_scan",
        "filter_shard",
        "filter_shard_map",
        "filter_switch",
        "filter_value_and_grad",
        "filter_vjp",
        "filter_vmap",
        "filter_while_loop",
        "frozen",
        "gather",
        "if_array",
        "inference",
        "internal",
        "intervene",
        "is_array",
        "is_array_like",
        "is_inexact_array",
        "is_inexact_array_like",
        "is_inference",
        "load",
        "load_metadata",
        "load_state_dict",
        "module_update_wrapper",
        "nn",
        "partition",
        "save",
        "select",
        "state_dict",
        "tag",
        "to_onnx",
        "trainable",
        "training",
        "tree_at",
        "tree_check",
        "tree_copy",
        "tree_deserialise_leaves",
        "tree_equal",
        "tree_flatten_one_level",
        "tree_inference",
        "tree_pformat",
        "tree_pprint",
        "tree_serialise_leaves",
        "unfrozen",
    ]


PUBLIC = [(n, v) for n, v in public_objects(eqx) if ".internal." not in n]


def test_public_functions_and_exceptions_name_their_public_module():
    private = [
        f"{name}: {value.__module__}"
        for name, value in PUBLIC
        if isinstance(value, FunctionType)
        or (isinstance(value, type) and issubclass(value, BaseException))
        if "._" in value.__module__
    ]
    assert private == []
    assert pickle.loads(pickle.dumps(eqx.filter_scan)) is eqx.filter_scan


# Caught within the library: what a user meets instead is in the comment.
SIGNALS = {
    "NoText",  # nothing, or `ValueError`: "cannot compare"
    "RecordMismatch",  # `LeafError`
    "UnexpectedTrace",  # nothing: the function is traced
    "_NoDescriptionError",  # itself, which is a `LeafError` and a `ValueError`
    "_Batched",  # `ValueError`, which names the unmapped output
    "_Unfit",  # `ValueError`, with all misfits of a state dict
}


def exception_classes() -> set[type[BaseException]]:
    """Those that any file of the package defines."""
    files = pkgutil.walk_packages(eqx.__path__, "equinox_like.")
    modules = [
        importlib.import_module(file.name)
        for file in files
        if "_alias" not in file.name and not file.name.endswith("as_equinox")
    ]
    return {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__.startswith("equinox_like")
    }


def test_every_exception_of_the_library_can_be_imported_from_it():
    found = exception_classes()
    assert {e.__name__ for e in found if e.__module__ != "equinox_like"} == SIGNALS
    public = [e for e in found if e.__module__ == "equinox_like"]
    page = (ROOT / "docs" / "api" / "errors.md").read_text()
    for error in public:
        assert vars(eqx)[error.__name__] is error
        assert f"\n::: equinox_like.{error.__name__}\n" in page
        assert type(pickle.loads(pickle.dumps(error("text")))) is error
    own = {e for e in vars(_errors).values() if isinstance(e, type)}
    assert {e for e in own if issubclass(e, BaseException)} == set(public)


def call_without_key():
    eqx.nn.Dropout(0.5)(jnp.ones(2))


def call_with_objects():
    eqx.nn.Linear(1, 2, key=jax.random.key(0))(np.array([None]))


def read_other_shape():
    file = io.BytesIO()
    eqx.default_serialise_filter_spec(file, jnp.ones(2))
    file.seek(0)
    eqx.default_deserialise_filter_spec(file, jnp.ones(3))


@pytest.mark.parametrize(
    ("call", "name", "text"),
    [
        (call_without_key, "MissingKeyError", "^Dropout needs a `key`"),
        (call_with_objects, "NotAnArrayError", "takes an array as `x`; got"),
        (read_other_shape, "LeafError", r"record has shape \(2,\) .* \(3,\) in `x`"),
    ],
)
def test_raised_class_is_public(call, name, text):
    with pytest.raises(getattr(eqx, name), match=text) as caught:
        call()
    assert f"{caught.type.__module__}.{caught.type.__name__}" == f"equinox_like.{name}"


def test_source_of_public_classes_is_found():
    assert inspect.getsource(eqx.nn.Linear).startswith("class Linear(Module):")
    assert inspect.getsource(eqx.nn.causal_mask).startswith("def causal_mask(")


def test_signatures_show_types_of_arguments_by_their_names():
    shown = str(inspect.signature(eqx.nn.Linear))
    # Before Python 3.12 the second is shown as the first.
    optional = "dtype: Optional[DTypeLike] = None", "dtype: DTypeLike | None = None"
    assert any(text in shown for text in optional)
    assert "key: PRNGKeyArray" in shown
    spelled_out = [
        name
        for name, value in PUBLIC
        if isinstance(value, FunctionType)
        or (isinstance(value, type) and not issubclass(value, BaseException))
        if re.search("SupportsDType|numpy.number", str(inspect.signature(value)))
    ]
    assert spelled_out == []


def test_signatures_show_no_private_function_or_object_as_a_default():
    unreadable = [
        f"{name}({parameter})"
        for name, value in PUBLIC
        if isinstance(value, FunctionType)
        or (isinstance(value, type) and not issubclass(value, BaseException))
        for parameter in inspect.signature(value).parameters.values()
        if parameter.default is not parameter.empty
        and re.match(
            r"<(function _|function <lambda>|object|equinox_like)",
            repr(parameter.default),
        )
    ]
    assert unreadable == []


def test_arguments_have_the_names_that_the_page_says():
    page = (
        (ROOT / "docs/api/index.md").read_text().partition("## Names of arguments")[2]
    )
    found: dict[str, set[str]] = {"fn": set(), "f": set(), "pytree": set()}
    for path, value in public_objects(eqx):
        name = path.removeprefix("equinox_like.")
        if name.startswith(("internal.", "tree_", "default_")) or not callable(value):
            continue
        with contextlib.suppress(ValueError, TypeError):  # it has no signature
            for parameter in found.keys() & inspect.signature(value).parameters.keys():
                found[parameter].add(name)
    for parameter, names in found.items():
        (said,) = re.findall(rf"`{parameter}` in (.*?)[.;]\s", page, re.DOTALL)
        assert names == set(re.findall("`([^`]+)`", said)) - {"tree_"}, parameter


def test_help_lists_fields_beside_the_methods():
    text = pydoc.plain(pydoc.render_doc(eqx.nn.Linear))
    methods, _, data = text.partition("Data descriptors defined here")
    assert "weight" in data
    for name in ("weight", "bias", "in_features"):
        assert not re.search(rf"^ \|  {name}\b", methods, re.MULTILINE)
        assert inspect.isdatadescriptor(vars(eqx.nn.Linear)[name])


def test_field_is_read_from_the_instance_first():
    layer = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    assert layer.weight is vars(layer)["weight"]
    with pytest.raises(AttributeError, match="in_feature"):
        layer.in_feature  # noqa: B018


def test_library_compiled_without_its_source_hides_its_frames(tmp_path):
    package = tmp_path / "equinox_like"
    shutil.copytree(Path(eqx.__file__).parent, package)
    assert compileall.compile_dir(package, ddir="built/here", legacy=True, quiet=1)
    for source in package.rglob("*.py"):
        source.unlink()
    script = tmp_path / "script.py"
    script.write_text(
        "import equinox_like as eqx\n"
        "eqx.nn.Dropout(deterministic=True)\n"
        "eqx.filter_jit(lambda x: undefined)(1.0)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert "script.py:2: UserWarning" in done.stderr
    assert "NameError" in done.stderr and "built/here" not in done.stderr
