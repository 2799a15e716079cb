"""The list of slow tests names tests that exist, so that it cannot grow old."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
SLOW = (TESTS / "slow.txt").read_text().split()


def functions_of(body, prefix):
    """The names of the functions in `body` and in its classes, as pytest writes them."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield f"{prefix}::{name}"
            case ast.ClassDef(name=name):
                yield from functions_of(node.body, f"{prefix}::{name}")


def test_each_slow_test_exists() -> None:
    exist = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in functions_of(
            ast.parse(file.read_text()).body, file.relative_to(TESTS).as_posix()
        )
    }
    gone = [name for name in SLOW if name not in exist]
    assert gone == [], "renamed or deleted: correct tests/slow.txt"


def test_list_of_slow_tests_is_sorted() -> None:
    assert sorted(set(SLOW)) == SLOW


def test_only_listed_tests_are_slow(request) -> None:
    for item in request.session.items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        assert (item.get_closest_marker("slow") is not None) is (name in SLOW)
