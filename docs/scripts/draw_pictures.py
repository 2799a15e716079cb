"""Draws the pictures of the pages, as SVG in `docs/images`.

python docs/scripts/draw_pictures.py
"""

import html
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
SANS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
DARK, GREY, BLUE = "#1d2433", "#48506a", "#5c6bc0"

# From the highest layer to the lowest: the folders of a row, and what they hold.
LAYERS = [
    [
        ("internal/", "names for library authors"),
        ("orbax.py", "checkpoints of Orbax"),
        ("as_equinox.py", "import equinox"),
    ],
    [("nn/", "layers, in rooms"), ("debug/", "tools to look inside")],
    [("_loops/", "scan, cond, while loops")],
    [("_runtime/", "checks and other primitives of ours; capture")],
    [("_transforms/", "grad, vmap, meshes, custom rules, callbacks")],
    [("_jit/", "filter_jit: layouts, programs, donation, stages, export")],
    [("_core/", "calls taken apart, wrappers, contexts, differences by path")],
    [("_module/", "the class Module"), ("_io/", "trees in files")],
    [("_tree/", "pytrees: filters, surgery, comparison, our registry")],
    [("_compat/", "all unstable JAX"), ("_errors.py ...", "depend on nothing")],
]
# What each call does, in which file; and what is done once, by which function.
CALL = [
    ("f(model, x)", "Jitted: the wrapper, itself a Module", "_jit/jit.py", None),
    (
        "flatten in C++",
        "arrays, and one Structure for all that is static",
        "_tree/registry.py",
        ("types are adopted, structures interned", "OwnRegistry.describe"),
    ),
    (
        "layout",
        "which leaf goes to which group; by structure and types",
        "_jit/layout.py",
        ("bind to the signature, label the leaves", "LayoutTable.add"),
    ),
    (
        "specialization",
        "the compiled function; by the static leaves",
        "_jit/specialization.py",
        ("a Skeleton, a new jax.jit", "Program._specialize"),
    ),
    (
        "jax.jit",
        "groups of arrays in; arrays and a number out",
        "JAX",
        ("the user's function is traced", "Specialization._trace"),
    ),
    (
        "build in C++",
        "the output, with lazy Modules; by the number",
        "_tree/cached.py",
        ("the output is described", "Specialization.take_apart"),
    ),
]
# The time until a train step returns, as a multiple of `jax.jit`: docs/performance.md.
STEPS = [
    ("MLP, 13 arrays", (1.15, 4.5, 7)),
    ("1 transformer block, 37 arrays", (1.0, 5.5, 8)),
    ("12 blocks, 433 arrays", (0.9, 3.9, 6)),
    ("ResNet, 211 arrays", (0.9, 5.5, 6)),
]
LIBRARIES = ("equinox_like", "#3f51b5"), ("Equinox", "#9aa3c7"), ("Flax NNX", "#d3d7e6")


def text(x, y, content, size=14.0, font=SANS, color=DARK, anchor="start", weight=400):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-family="{font}" fill="{color}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{html.escape(content)}</text>'
    )


def box(x, y, width, height, fill="#eef1fb", stroke=BLUE):
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def arrow(x, y, to_x, to_y, dashes="none"):
    return (
        f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{BLUE}" stroke-width="1.5" '
        f'stroke-dasharray="{dashes}" marker-end="url(#head)"/>'
    )


def write(name, title, width, height, parts):
    IMAGES.mkdir(exist_ok=True)
    head = (
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{BLUE}"/></marker></defs>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img">',
        f"<title>{html.escape(title)}</title>",
        head,
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        *parts,
        "</svg>\n",
    ]
    (IMAGES / name).write_text("\n".join(lines))


def draw_layers():
    parts, y = [], 20
    for row in LAYERS:
        width = (720 - 12 * (len(row) - 1)) / len(row)
        for i, (name, what) in enumerate(row):
            x = 20 + i * (width + 12)
            parts.append(box(x, y, width, 36))
            if len(row) < 3:
                parts.append(text(x + 12, y + 23, name, font=MONO, weight=600))
                parts.append(
                    text(x + width - 12, y + 23, what, 12.5, color=GREY, anchor="end")
                )
            else:
                middle = x + width / 2
                parts.append(
                    text(middle, y + 16, name, 13, MONO, anchor="middle", weight=600)
                )
                parts.append(
                    text(middle, y + 30, what, 11.5, color=GREY, anchor="middle")
                )
        y += 46
    rule = "A file imports from its own folder or from rows below, never from above."
    parts.append(text(380, y + 8, rule, 12.5, color=GREY, anchor="middle"))
    write("layers.svg", "The layers of the package", 760, y + 24, parts)


def draw_call():
    parts = [
        text(30, 26, "each call", 13, weight=600),
        text(506, 26, "only if it is not known yet", 13, weight=600),
    ]
    y = 44
    for i, (name, what, where, once) in enumerate(CALL):
        if i:
            parts.append(arrow(230, y - 20, 230, y - 2))
        is_jax = where == "JAX"
        parts.append(
            box(20, y, 420, 48, "#e8f5ee", "#2e8b57") if is_jax else box(20, y, 420, 48)
        )
        parts.append(text(34, y + 20, name, font=MONO, weight=600))
        parts.append(text(428, y + 20, where, 12, MONO, GREY, "end"))
        parts.append(text(34, y + 38, what, 12.5, color=GREY))
        if once is not None:
            parts.append(arrow(440, y + 24, 492, y + 24, "5 4"))
            parts.append(box(494, y, 266, 48, "#fff6e5", "#c78a1b"))
            parts.append(text(506, y + 20, once[0], 12.5))
            parts.append(text(506, y + 38, once[1], 12, MONO, "#6b5a2b"))
        y += 68
    write("call.svg", "A call of a function of filter_jit", 780, y, parts)


def draw_steps():
    scale, left, y = 56, 236, 62
    parts = [
        text(
            20,
            24,
            "Time until a train step returns, as a multiple of jax.jit",
            weight=600,
        )
    ]
    x = 20
    for name, color in LIBRARIES:
        parts.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{color}"/>')
        parts.append(text(x + 17, 46, name, 12.5, color=GREY))
        x += 34 + 8 * len(name)
    top = y
    for network, times in STEPS:
        parts.append(text(left - 10, y + 27, network, 12.5, anchor="end"))
        for time, (_, color) in zip(times, LIBRARIES, strict=True):
            width = scale * time
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width}" height="12" fill="{color}"/>'
            )
            parts.append(
                text(left + max(width, scale) + 6, y + 10, f"{time:g}", 11, color=GREY)
            )
            y += 14
        y += 12
    one = left + scale
    parts.append(
        f'<path d="M{one} {top - 6}V{y - 6}" stroke="{DARK}" stroke-dasharray="3 3"/>'
    )
    parts.append(text(one, y + 8, "jax.jit", 11.5, MONO, anchor="middle"))
    write("steps.svg", "Time until a train step returns", 760, y + 22, parts)


if __name__ == "__main__":
    draw_layers()
    draw_call()
    draw_steps()
