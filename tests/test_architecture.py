"""The rules on imports that import-linter cannot see, read off the source.

import-linter checks which layer imports which (`pyproject.toml`). It sees other packages
whole, and no assignments; this file reads the syntax trees for the rest.
"""

import ast
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import equinox_like

ROOT = Path(__file__).parents[1]
PACKAGE = Path(equinox_like.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
UNSTABLE = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def package_of(source: Path) -> list[str]:
    return ["equinox_like", *source.parent.relative_to(PACKAGE).parts]


def imports_of(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str, str]]:
    """Line, absolute dotted name, and the name it is bound to, of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield node.lineno, alias.name, bound
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, node.module] if node.module else base
            for alias in node.names:
                name = ".".join([*base, alias.name])
                yield node.lineno, name, alias.asname or alias.name


def attributes_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each chain of names, such as `jax.core.Tracer`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def unstable_uses(tree: ast.AST, package: list[str]) -> list[str]:
    uses = {(line, name) for line, name, _ in imports_of(tree, package)}
    uses.update(attributes_of(tree))
    return [
        f"line {line}: {name}"
        for line, name in sorted(uses)
        if any(is_within(name, unstable) for unstable in UNSTABLE)
    ]


def late_imports(tree: ast.AST, package: list[str]) -> list[str]:
    """Imports within a function of what is not a lower layer.

    A lower layer may load late to keep `import equinox_like` quick. Anything else inside a
    function hides a cycle: what lives in the same folder, or the whole package.
    """
    own = ".".join(package[:2])
    return [
        f"line {line}: {name}"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for line, name, _ in imports_of(function, package)
        if name == "equinox_like" or is_within(name, own)
    ]


def imports_of_the_whole(tree: ast.AST, package: list[str]) -> list[str]:
    """Imports of the public package by one of its own files: that is every layer."""
    found = []
    for line, name, _ in imports_of(tree, package):
        root, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        exists = (PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists()
        if root == "equinox_like" and not (part and exists):
            found.append(f"line {line}: {name}")
    return found


def foreign_assignments(tree: ast.AST, package: list[str]) -> list[str]:
    """Assignments to an attribute of something that was imported."""
    imported = {bound for _, _, bound in imports_of(tree, package)}
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Call(func=ast.Name("setattr" | "delattr"), args=[first, *_]):
                targets = [ast.Attribute(first, "...")]
            case _:
                continue
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            if (
                root is not target
                and isinstance(root, ast.Name)
                and root.id in imported
            ):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def name_of(source: Path) -> str:
    return source.relative_to(PACKAGE).as_posix()


def parse(source: Path) -> ast.Module:
    return ast.parse(source.read_text(), str(source))


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s.parent != PACKAGE / "_compat"], ids=name_of
)
def test_unstable_jax_is_imported_in_compat_only(source: Path) -> None:
    assert unstable_uses(parse(source), package_of(source)) == []


# The package itself may load a rarely used part when it is first asked for.
@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s != PACKAGE / "__init__.py"], ids=name_of
)
def test_no_late_import_hides_a_cycle(source: Path) -> None:
    assert late_imports(parse(source), package_of(source)) == []


@pytest.mark.parametrize(
    "source",
    # What stands for Equinox is no part of the package; it is in a folder of it.
    [s for s in SOURCES if "_alias" not in s.parts],
    ids=name_of,
)
def test_no_file_imports_the_whole_package(source: Path) -> None:
    assert imports_of_the_whole(parse(source), package_of(source)) == []


def test_no_files_import_each_other_in_a_circle():
    sources = {".".join([*package_of(f), f.stem]): f for f in SOURCES}
    imported = {
        name: {
            other
            for _, target, _ in imports_of(ast.parse(f.read_text()), package_of(f))
            for other in (target, target.rpartition(".")[0])
            if other in sources and other != name
        }
        for name, f in sources.items()
    }
    while leaves := {name for name, others in imported.items() if not others}:
        imported = {n: xs - leaves for n, xs in imported.items() if n not in leaves}
    assert not imported


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_nothing_imported_is_patched(source: Path) -> None:
    assert foreign_assignments(parse(source), package_of(source)) == []


def test_each_file_of_compat_says_which_versions_it_serves():
    files = (PACKAGE / "_compat").glob("[!_]*.py")
    silent = {file.name for file in files if "Serves jax 0." not in file.read_text()}
    assert not silent


def test_package_layout_on_the_page_has_the_order_of_the_layers():
    page = (ROOT / "docs/architecture.md").read_text()
    block = page.partition("```text\nequinox_like/\n")[2].partition("```")[0]
    listed = [line.split()[0].rstrip("/") for line in block.splitlines()]
    parts = {source.relative_to(PACKAGE).parts[0] for source in SOURCES}
    assert set(listed) == parts - {"_alias"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        contract, _ = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in reversed(contract["layers"])]
    height = {name: number for number, layer in enumerate(layers) for name in layer}
    heights = [height[name.removesuffix(".py")] for name in listed[:-1]]
    assert heights == sorted(heights)


def test_no_file_is_named_like_a_function_of_its_folder():
    """The two would hide each other from whatever reads the source, as the API pages do."""
    hidden = [
        f"{name_of(source)}: {bound}"
        for source in SOURCES
        if source.name == "__init__.py"
        for _, name, bound in imports_of(parse(source), package_of(source))
        if (source.parent / f"{bound}.py").exists()
        and name != ".".join([*package_of(source), bound])
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (unstable_uses, "import jax.core"),
        (unstable_uses, "from jax import core"),
        (unstable_uses, "from jax._src.core import Tracer"),
        (unstable_uses, "import jax\njax.extend.core.primitives"),
        (late_imports, "def f():\n    from .splitting import merge"),
        (late_imports, "def f():\n    from .. import _tree"),
        (late_imports, "def f():\n    import equinox_like"),
        (imports_of_the_whole, "import equinox_like as eqx"),
        (imports_of_the_whole, "from .. import partition"),
        (foreign_assignments, "import jax\njax.jit = None"),
        (foreign_assignments, "from . import split\nsplit.cache += 1"),
        (foreign_assignments, "import jax\nsetattr(jax, 'jit', None)"),
    ],
)
def test_breach_is_found(check, code: str) -> None:
    assert check(ast.parse(code), ["equinox_like", "_tree"])


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (unstable_uses, "import jax\njax.tree.map"),
        (unstable_uses, "from .._compat import core"),
        (late_imports, "from .splitting import merge"),
        (late_imports, "def f():\n    import wadler_lindig"),
        (late_imports, "def f():\n    from .._errors import LeafError"),
        (imports_of_the_whole, "from .._tree.splitting import merge"),
        (imports_of_the_whole, "from .partitioning import partition"),
        (foreign_assignments, "import jax\nx = jax.jit"),
        (foreign_assignments, "def f(self):\n    self.x = 1"),
    ],
)
def test_allowed_code_passes(check, code: str) -> None:
    assert check(ast.parse(code), ["equinox_like", "_tree"]) == []


FILES = runpy.run_path(str(ROOT / "scripts" / "files"))


def test_page_on_files_says_what_the_files_say() -> None:
    page = (ROOT / "docs" / "files.md").read_text("utf-8")
    assert page == FILES["page"](), "run `scripts/files --write`"


def test_page_on_files_names_tests_of_each_file() -> None:
    without = [name for name, (_, tests) in FILES["rows"]().items() if not any(tests)]
    assert without == [], "name their tests in docs/files.md"
    named = {test for _, tests in FILES["rows"]().values() for test in tests}
    gone = [test for test in named if test and not (ROOT / "tests" / test).exists()]
    assert gone == [], "correct docs/files.md"


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_first_line_says_in_one_sentence_what_lives_there(source: Path) -> None:
    text = FILES["first_line"](source)
    assert text.endswith(".") and "|" not in text
    assert "  " not in text and len(text) <= 100, "it is a row of docs/files.md"
