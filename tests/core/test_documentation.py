"""`doc_repr` and `doc_remove_args`: what documentation shows, and only documentation."""

import inspect
import typing

import pytest

import equinox_like as eqx
from equinox_like.internal import doc_remove_args, doc_repr


@pytest.fixture
def generating(monkeypatch):
    monkeypatch.setattr(typing, "GENERATING_DOCUMENTATION", True, raising=False)


def make():
    def f(x, _internal=1, *, y=2):
        return x

    return f


def test_ordinarily_nothing_changes():
    f = make()
    assert doc_repr(f, "text") is f
    assert doc_remove_args("_internal")(f) is f
    assert [*inspect.signature(f).parameters] == ["x", "_internal", "y"]


def test_text_is_shown_also_within_annotations(generating):
    shown = doc_repr(lambda x: x + 1, "some text")
    assert repr(shown) == str(shown) == "some text"
    assert str(list[shown]) == "list[some text]"
    assert str(dict[str, shown]) == "dict[str, some text]"
    assert shown(1) == 2
    assert repr(doc_repr(3, "three")) == "three"


def test_parameters_are_removed_from_the_signature(generating):
    f = make()
    assert doc_remove_args("_internal", "no such name")(f) is f
    assert str(inspect.signature(f)) == "(x, *, y=2)" and f(1, 2, y=3) == 1


@pytest.mark.parametrize("wrap", [eqx.filter_jit, eqx.filter_vmap])
def test_parameters_of_wrappers_are_removed(generating, wrap):
    f = wrap(make())
    assert doc_remove_args("_internal")(f) is f
    assert str(inspect.signature(f)) == "(x, *, y=2)"
