"""What `help` shows of public names, in a terminal."""

import inspect
import pydoc
import re

import jedi
import pytest

import equinox_like as eqx
from equinox_like import nn

# A formula: `$x$`, or a command such as `\frac`.
TEX = re.compile(r"\$|\\[a-z]")
LAYERS = {
    name: value
    for name, value in vars(nn).items()
    if not name.startswith("_") and isinstance(value, type)
}
FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (eqx, nn)
    for name in dir(module)
    if not name.startswith("_") and inspect.isfunction(getattr(module, name))
}


def documentation(value) -> list[str]:
    return (inspect.getdoc(value) or "").splitlines()


@pytest.mark.parametrize("name", LAYERS)
def test_class_describes_each_argument_before_any_formula(name) -> None:
    lines = documentation(LAYERS[name])
    described = set(re.findall(r"`\**(\w+)`", "\n".join(lines)))
    signature = inspect.signature(LAYERS[name])
    assert signature.parameters.keys() <= described
    assert not TEX.search("\n".join(lines[:15]))
    assert not TEX.search(" ".join(entries(LAYERS[name]).values()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_begins_with_words(name) -> None:
    lines = documentation(FUNCTIONS[name])
    assert lines and not TEX.search("\n".join(lines[:15]))


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "MLP", "MultiheadAttention"])
def test_first_screen_has_arguments_and_no_list_of_bases(name) -> None:
    text = pydoc.plain(pydoc.render_doc(LAYERS[name]))
    screen = "\n".join(text.splitlines()[:40])
    assert "**Arguments:**" in screen
    assert "Method resolution order" not in screen and not TEX.search(screen)


def test_arguments_are_described_once() -> None:
    text = pydoc.plain(pydoc.render_doc(nn.Linear))
    assert text.count("- `in_features`: ") == 1


def test_sibling_describes_an_argument_in_the_same_words() -> None:
    """Those of `Conv1d` to `Conv3d` are `Conv`'s, and so on."""
    pairs = {nn.Conv2d: nn.Conv, nn.MaxPool2d: nn.Pool, nn.LSTMCell: nn.GRUCell}
    pairs |= {nn.ConvTranspose2d: nn.ConvTranspose, nn.RMSNorm: nn.LayerNorm}
    for one, other in pairs.items():
        assert len(entries(one).keys() & entries(other).keys()) >= 3
        differing = {k for k, v in entries(one).items() if entries(other).get(k) != v}
        assert differing <= {"padding", "eps", "weight_init", "bias_init"}


def entries(layer) -> dict[str, str]:
    """The text of each argument."""
    _, _, text = "\n".join(documentation(layer)).partition("**Arguments:**\n\n")
    text = text.split("\n\n")[0]
    return {
        name: " ".join(entry.split(": ", 1)[1].split())
        for entry in re.split(r"^- ", text, flags=re.M)[1:]
        for name in re.findall(r"`(\w+)`", entry.split(": ")[0])
    }


def test_filter_jit_begins_with_what_is_traced_and_what_is_static() -> None:
    lines = documentation(eqx.filter_jit)
    start = " ".join(lines[: lines.index("**Arguments:**")])
    assert "arrays are traced" in start and "Static are Python numbers" in start


DECORATORS = (
    "eqx.filter_jit",
    "eqx.filter_jit(donate='all')",
    "eqx.filter_vmap",
    "eqx.filter_vmap(in_axes=(None, 0))",
    "eqx.filter_pmap",
    "eqx.filter_shard_map(in_specs=None, out_specs=None)",
    "eqx.filter_checkpoint(policy=None)",
    "eqx.filter_grad",
    "eqx.filter_value_and_grad(has_aux=True)",
    "eqx.filter_jacfwd",
    "eqx.filter_jit\n@eqx.filter_vmap",
)
STEP = "step(model, x: jax.Array, *, scale=2.0) -> jax.Array"


def shown_by_an_editor(code: str) -> list[str]:
    """The signatures at the end of `code`, by an editor that runs nothing."""
    signatures = jedi.Script(f"import jax\nimport equinox_like as eqx\n{code}(")
    return [signature.to_string() for signature in signatures.get_signatures()]


@pytest.mark.parametrize("decorator", DECORATORS)
def test_an_editor_shows_the_signature_of_a_decorated_function(decorator) -> None:
    shown = shown_by_an_editor(f"@{decorator}\ndef {STEP}: ...\nstep")
    assert shown[0] == STEP


def test_an_editor_shows_the_signature_of_a_compiled_function_and_method() -> None:
    assert shown_by_an_editor(f"def {STEP}: ...\nrun = eqx.filter_jit(step)\nrun") == [
        STEP
    ]
    method = "class M(eqx.Module):\n    @eqx.filter_jit\n    def go(self, a, b): ...\n"
    assert shown_by_an_editor(f"{method}M().go") == ["go(a, b)"]
