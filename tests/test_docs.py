"""Every Python block that a reader may copy, from the README, the pages and the public
docstrings, runs.

A block opens with ```python and stands for a whole program: it runs in a module of its
own, in an empty folder. The blocks of a page whose front matter says `blocks: one program`
run one after another in one module, as a reader of a tutorial types them. An excerpt that
cannot run opens with another word, for example ```text.
"""

import inspect
import linecache
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import equinox_like
from equinox_like._jit.donation import MODES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<indent>[ ]*)```python[ ]*\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def blocks_of(text: str) -> Iterator[tuple[int, str]]:
    """The line on which each block's code starts, and the code."""
    for match in BLOCK.finditer(text):
        yield (
            text.count("\n", 0, match.start("code")) + 1,
            textwrap.dedent(match["code"]),
        )


def programs_of(page: str) -> Iterator[tuple[int, str]]:
    """As `blocks_of`, with the blocks of a tutorial as one program."""
    blocks = list(blocks_of(page))
    if re.match(r"---\n(?:.*\n)*?blocks: one program\n(?:.*\n)*?---\n", page):
        first, code = blocks[0]
        for line, block in blocks[1:]:
            # Blank lines between them, so that a traceback shows the line of the page.
            code += "\n" * (line - first - code.count("\n")) + block
        blocks = [(first, code)]
    yield from blocks


def public_names(module: types.ModuleType) -> list[str]:
    names = getattr(module, "__all__", None) or [
        name for name in dir(module) if not name.startswith("_")
    ]
    # `dir` leaves out what needs another package.
    return [*names, "orbax"] if module is equinox_like else names


def public_objects(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What `module` and its public submodules offer, but for the modules themselves."""
    for name in public_names(module):
        path, value = f"{module.__name__}.{name}", getattr(module, name)
        if not isinstance(value, types.ModuleType):
            yield path, value
        elif value.__name__ == path:
            yield from public_objects(value)


def docstrings() -> Iterator[tuple[str, str]]:
    """Those of the public objects, and of the members of public classes."""
    for path, value in public_objects(equinox_like):
        members = vars(value) if isinstance(value, type) else {}
        public = [m for m in members if m in ("__init__", "__call__") or m[0] != "_"]
        yield path, inspect.getdoc(value) or ""
        for member in public:
            yield f"{path}.{member}", inspect.getdoc(members[member]) or ""


def collect() -> Iterator[Any]:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for line, code in programs_of(page.read_text()):
            # Blank lines first, so that a traceback shows the line of the page.
            yield pytest.param("\n" * (line - 1) + code, id=f"{name}:{line}")
    seen = set()  # one object may be public under several names
    for name, docstring in docstrings():
        if docstring not in seen:
            seen.add(docstring)
            for number, (_, code) in enumerate(blocks_of(docstring), 1):
                yield pytest.param(code, id=f"{name}:{number}")


BLOCKS = list(collect())


@pytest.mark.parametrize("code", BLOCKS)
def test_block_runs(code: str, request, tmp_path, monkeypatch) -> None:
    filename = f"<{request.node.callspec.id}>"
    module = types.ModuleType("documented_block")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        linecache.cache, filename, (len(code), None, code.splitlines(True), filename)
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(code, filename, "exec"), vars(module))


def test_blocks_are_found() -> None:
    ids = [block.id for block in BLOCKS]
    assert any(name.startswith("README.md:") for name in ids)
    assert any(name.startswith("docs/") for name in ids)
    assert any(name.startswith("equinox_like.") for name in ids)


def test_page_on_printing_shows_what_is_printed(capsys) -> None:
    page = (ROOT / "docs" / "printing.md").read_text()
    shown = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for (_, code), lines in zip(blocks_of(page), shown, strict=True):
        exec(code, {})
        jax.effects_barrier()
        # In any order, because programs run asynchronously.
        printed = capsys.readouterr().out.splitlines()
        assert sorted(printed) == sorted(lines.splitlines())


def test_optimisers_are_started_with_the_trainable_arrays() -> None:
    """`is_inexact_array` would also choose what is frozen."""
    starts = [b for b in BLOCKS if re.search(r"optimiser\.init\(", b.values[0])]
    assert [b.id for b in starts if "is_inexact_array" in b.values[0]] == []
    assert len(starts) > 10


def test_every_public_name_has_its_place_on_an_api_page() -> None:
    directive = re.compile(r"^::: (\S+)$", re.MULTILINE)
    pages = (ROOT / "docs" / "api").rglob("*.md")
    placed = [name for page in pages for name in directive.findall(page.read_text())]
    names = dict(public_objects(equinox_like))
    # What is public at the top or in `debug` has its place there, and needs no other.
    elsewhere = [value for name, value in names.items() if ".internal." not in name]
    again = {
        name
        for name, value in names.items()
        if ".internal." in name and any(value is other for other in elsewhere)
    }
    wanted = names.keys() - again
    assert wanted - set(placed) == set()
    assert sorted(placed) == sorted(wanted)


def test_each_mode_of_donation_is_described() -> None:
    page = (ROOT / "docs" / "donation.md").read_text()
    for text in (page, inspect.getdoc(equinox_like.filter_jit) or ""):
        assert [mode for mode in MODES if f'`"{mode}"`' not in text] == []


def test_table_of_donation_is_what_is_measured():
    script = ROOT / "docs" / "scripts" / "donation_table.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    rows = done.stdout.splitlines()
    assert len(rows) > 10
    page = (ROOT / "docs" / "donation.md").read_text().splitlines()
    assert [line for line in page if line.startswith(rows[0][:20])] == rows[:1]
    start = page.index(rows[0])
    assert page[start : start + len(rows)] == rows
