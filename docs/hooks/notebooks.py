"""Each notebook of `examples/` as a page: its text, code and saved outputs.

Nothing is executed. The pages come last in the section "Examples" of the navigation, and
each has a link to its notebook. The files of the projects in `examples/`, of which a page
tells, can be downloaded, too.
"""

import re
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    (ROOT / "examples").glob("*.ipynb"), key=lambda p: (p.stem != "quickstart", p.stem)
)
PROJECTS = [
    ROOT / "examples" / name
    for name in ("back_to_pytorch", "hugging_face", "resnet", "train_language_model")
]
SECTION = "Examples"  # of the navigation, where the notebooks come last
# As nbconvert's own template, but what a cell printed is a block of class `output`.
TEMPLATE = """
{%- extends "markdown/index.md.j2" -%}
{%- macro printed(text) %}
`````{.text .output}
{{ (text | strip_ansi).rstrip() }}
`````
{% endmacro -%}
{%- block stream %}{{ printed(output.text) }}{% endblock -%}
{%- block data_text %}{{ printed(output.data["text/plain"]) }}{% endblock -%}
{%- block error %}{{ printed(output.traceback | join("\n")) }}{% endblock -%}
"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{title_of(path): page_of(path)} for path in NOTEBOOKS]
    section = next(entry for entry in config.nav or [] if SECTION in entry)
    section[SECTION].extend(pages)
    # `mkdocs serve` reads the notebooks again when they change.
    config.watch.append(str(ROOT / "examples"))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in NOTEBOOKS:
        text, outputs = convert(path)
        files.append(File.generated(config, page_of(path), content=text))
        notebook = File.generated(
            config, f"examples/{path.name}", content=path.read_bytes()
        )
        files.append(notebook)
        for name, content in outputs.items():
            files.append(
                File.generated(config, f"examples/{path.stem}/{name}", content=content)
            )
    for path in sorted(path for folder in PROJECTS for path in folder.glob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=path.read_text()))
    return files


def convert(path: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook, and the images in its outputs."""
    notebook = nbformat.read(path, as_version=4)
    exporter = MarkdownExporter(
        extra_loaders=[DictLoader({"page": TEMPLATE})], template_file="page"
    )
    text, resources = exporter.from_notebook_node(notebook)
    link = f"[Download this notebook]({path.name}){{ download }}\n"
    title, _, body = text.partition("\n\n")
    for name in resources["outputs"]:
        body = body.replace(f"({name})", f"({path.stem}/{name})")
    # In a notebook a link names a file of the repository; here, the page made of it.
    body = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", body)
    body = body.replace("](../docs/", "](../")
    return f"{title}\n\n{link}\n{body}", resources["outputs"]


def title_of(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    first = cells[0].source.partition("\n")[0] if cells else ""
    if not first.startswith("# "):
        raise ValueError(f"{path.name} must begin with a cell of text `# Title`.")
    return first.removeprefix("# ")


def page_of(path: Path) -> str:
    return f"examples/{path.stem}.md"
