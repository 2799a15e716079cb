"""What treescope shows of Modules."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import treescope

import equinox_like as eqx


class Affine(eqx.Module):
    weight: object
    bias: object = None
    hidden: object = eqx.field(default=0, repr=False)
    name: object = eqx.field(static=True, default="affine")

    def method(self):
        return self


def html(tree):
    return treescope.render_to_html(tree, compressed=False)


def test_module_is_rendered_field_by_field():
    text = treescope.render_to_text(Affine(jnp.ones(2), [1, (2,)]))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "Affine(" and lines[-1] == ")"
    assert "bias=[1, (2,)]," in lines
    assert "name='affine'," in lines
    assert "hidden" not in text


def test_nested_modules_are_rendered_in_line():
    text = treescope.render_to_text([Affine(Affine(1)), 2])
    assert "weight=Affine(weight=1, bias=None, name='affine'),\n" in text


def test_bound_methods_and_transformed_modules_are_rendered():
    for tree in (Affine(1).method, eqx.filter_jit(Affine(1).method)):
        assert "Affine(weight=1" in treescope.render_to_text(tree).replace("\n", "")
        assert "Affine" in html(tree)


def test_unfinished_traced_and_recursive_modules_are_rendered():
    text = treescope.render_to_text(Affine.__new__(Affine))
    assert text == "Affine(bias=None, name='affine')"
    texts = []
    jax.jit(lambda m: texts.append(treescope.render_to_text(m)))(Affine(jnp.ones(2)))
    assert "float32[2]" in texts[0]
    model = Affine([])
    model.weight.append(model)
    assert "cyclic reference to Affine" in treescope.render_to_text(model)


@pytest.mark.parametrize("module", ["treescope", "wadler_lindig"])
def test_nothing_is_imported_before_something_is_shown(module):
    code = f"import equinox_like, sys; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
