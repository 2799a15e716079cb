"""Interactive displays of trees by treescope.

treescope calls the `__treescope_repr__` of the objects that it renders, so it is
installed when this code runs. Nothing else in the library imports it.
"""

import dataclasses
from typing import Any


def render(node: Any, path: str | None, subtree_renderer: Any) -> Any:
    """A dataclass as treescope shows it, with its static fields marked.

    Arguments and result are those of `__treescope_repr__`. The names of static fields
    are in italics, with a remark `# static` if the field has its own line.
    """
    from treescope import formatting_util, rendering_parts as parts

    children = []
    for field in dataclasses.fields(node):
        if not field.repr:
            continue
        name, remarks = parts.text(field.name), []
        if field.metadata.get("static", False):
            name = parts.custom_style(name, "font-style: italic")
            remarks = [parts.comment_color(parts.text("  # static"))]
        if hasattr(node, field.name):
            below = None if path is None else f"{path}.{field.name}"
            value = subtree_renderer(getattr(node, field.name), path=below)
        else:
            value = parts.text("<uninitialised>")
        children.append(
            parts.siblings_with_annotations(name, "=", value, extra_annotations=remarks)
        )
    return parts.build_foldable_tree_node_from_children(
        prefix=parts.render_dataclass_constructor(node),
        children=children,
        suffix=")",
        comma_separated=True,
        path=path,
        background_color=formatting_util.color_from_string(type(node).__qualname__),
    )
