"""The pages as they are built: what a reader's browser gets.

The site is built once, however many processes the tests run in.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup, Tag
from lunr.builder import Builder
from test_docs import public_objects

import equinox_like as eqx

ROOT = Path(__file__).resolve().parents[1]
# The page says which function that is, and shows no signature of its own.
SECOND_NAMES = ("equinox_like.nn.inference_mode",)
# Methods that users do not call: for other layers, for Orbax, old names.
WITHOUT_ENTRY = {
    "equinox_like.nn.Dropout.deterministic",
    "equinox_like.nn.Dropout.is_active",
    "equinox_like.nn.LoRA.is_stateful",
    "equinox_like.nn.Mixed.is_stateful",
    "equinox_like.nn.Quantized.is_stateful",
    "equinox_like.nn.RotaryPositionalEmbedding.precompute_freqs_cis",
    "equinox_like.nn.RotaryPositionalEmbedding.rotate_half",
    "equinox_like.nn.Sequential.is_stateful",
    "equinox_like.nn.Stacked.is_stateful",
    *(
        f"equinox_like.orbax.TreeHandler.{method}"
        for method in ("async_save", "close", "finalize", "metadata", "restore", "save")
    ),
}
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory, worker_id: str) -> Path:
    """The folder of the built site. The first process builds it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    log = folder.with_suffix(".log")
    try:
        folder.mkdir()
    except FileExistsError:
        while not log.exists():
            time.sleep(0.1)
    else:
        build = f"-m mkdocs build --strict --quiet --site-dir {folder}"
        done = subprocess.run(
            [sys.executable, *build.split()],
            cwd=ROOT,
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        written = log.with_suffix(".part")
        written.write_text("" if done.returncode == 0 else done.stdout)
        written.rename(log)
    assert log.read_text() == ""
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, BeautifulSoup]:
    """Each page by its path in the site: `api/module/` for example."""
    return {
        path.relative_to(site).as_posix().removesuffix("index.html"): BeautifulSoup(
            path.read_text(), "html.parser"
        )
        for path in sorted(site.rglob("*.html"))
        if path.name != "404.html"
    }


def links_of(page: BeautifulSoup) -> Iterator[str]:
    for tag in page.find_all(["a", "img", "link", "script"]):
        for attribute in ("href", "src"):
            if tag.get(attribute):
                yield str(tag[attribute])


def test_links_and_anchors_lead_somewhere(site: Path, pages) -> None:
    anchors = {
        path: {t["id"] for t in page.select("[id]")} for path, page in pages.items()
    }
    broken = []
    for path, page in pages.items():
        for link in {*links_of(page)}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                os.path.normpath(f"{path}{unquote(parts.path)}") if parts.path else path
            )
            target = "" if target == "." else target
            file = site / target
            if parts.path and file.is_dir():
                target = f"{target}/" if target else ""
                file /= "index.html"
            if not file.exists() and parts.path:
                broken.append(f"{path}: {link}")
            elif parts.fragment and unquote(parts.fragment) not in anchors[target]:
                broken.append(f"{path}: {link}")
    assert broken == []


def test_no_page_loads_anything_from_another_host(site: Path, pages) -> None:
    loaded = [
        f"{path}: {tag}"
        for path, page in pages.items()
        for tag in page.select("[src], link[href]")
        if urlsplit(str(tag.get("src") or tag["href"])).netloc
        and "canonical" not in (tag.get("rel") or ())
    ]
    imported = [
        f"{sheet.relative_to(site)}: {found}"
        for sheet in site.rglob("*.css")
        for found in re.findall(
            r"(?:@import|url\()\s*['\"]?(?:https?:)?//", sheet.read_text()
        )
    ]
    assert loaded + imported == []


def test_colours_are_those_of_the_system_until_the_reader_chooses(pages) -> None:
    """The first palette is the one that a first visit stores."""
    choices = pages[""].select("input[data-md-color-media]")
    media = [str(choice["data-md-color-media"]) for choice in choices]
    schemes = [f"(prefers-color-scheme: {scheme})" for scheme in ("light", "dark")]
    assert media == ["(prefers-color-scheme)", *schemes]


def test_no_markup_is_left_unrendered(pages) -> None:
    markup = re.compile(
        r"\$|\*\*|``|!!! |^:::|\]\[|\]\(|\\[a-zA-Z(\[]|\x1b", re.MULTILINE
    )
    left = []
    for path, page in pages.items():
        article = page.find("article")
        of_code = {
            id(string)
            for tag in article.find_all(["code", "pre", "script", "style"])
            for string in tag.strings
        }
        text = "".join(s for s in article.strings if id(s) not in of_code)
        left += [
            f"{path}: {line.strip()}"
            for line in text.splitlines()
            if markup.search(line)
        ]
    assert left == []


@pytest.fixture(scope="module")
def entries(pages: dict[str, BeautifulSoup]) -> dict[str, Tag]:
    """The entry of each name on the API pages."""
    entries = {}
    for page in pages.values():
        for entry in page.select(".doc-object"):
            heading = entry.find(class_="doc-heading")
            assert isinstance(heading, Tag)
            entries[str(heading["id"])] = entry
    return entries


def own(entry: Tag, css: str) -> list[Tag]:
    """What belongs to the entry itself, and not to the members shown within it."""
    return [t for t in entry.select(css) if t.find_parent(class_="doc-object") is entry]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_entry_of_each_function_has_its_signature(entries) -> None:
    wrong = []
    for name, value in public_objects(eqx):
        if isinstance(value, type):
            # What a class is made from is shown by its `__init__`, if that is shown.
            name, value = f"{name}.__init__", value.__init__
        if name in entries and inspect.isroutine(value):
            shown = " ".join(t.get_text() for t in own(entries[name], ".doc-signature"))
            # `**refused` takes names that only cause an error.
            parameters = {*inspect.signature(value).parameters} - {"self", "refused"}
            if not shown or not parameters <= words(shown):
                wrong.append(f"{name}: {shown!r}")
    assert [name for name in wrong if not name.startswith(SECOND_NAMES)] == []


def test_entry_of_each_name_has_its_own_text(entries) -> None:
    wrong = []
    for name, value in public_objects(eqx):
        if name in entries and (inspect.isroutine(value) or isinstance(value, type)):
            purpose = (inspect.getdoc(value) or "").split("\n\n")[0]
            assert purpose, name
            purpose = re.sub(r"\$.*?\$|\]\([^)]*\)", "", purpose)  # formulas, links
            shown = [t.get_text() for t in own(entries[name], ".doc-contents > p")]
            if not shown or not words(purpose) <= words(shown[0]):
                wrong.append(f"{name}: {shown[:1]}")
    assert [name for name in wrong if not name.startswith(SECOND_NAMES)] == []


def test_each_public_method_has_an_entry(entries) -> None:
    missing = {
        f"{name}.{member}"
        for name, value in public_objects(eqx)
        if isinstance(value, type) and ".internal." not in name
        for member, method in vars(value).items()
        if not member.startswith("_")
        and (callable(method) or isinstance(method, property | classmethod))
        and f"{name}.{member}" not in entries
    }
    assert missing == WITHOUT_ENTRY


def test_table_of_layers_names_every_layer(pages) -> None:
    table = pages["api/nn/"].select("td:first-child a")
    assert sorted(cell.get_text() for cell in table) == sorted(
        name
        for name, value in vars(eqx.nn).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_a_page_with_its_outputs(path: Path, site: Path, pages) -> None:
    page = pages[f"examples/{path.stem}/"].find("article")
    assert page.select_one(f'a[href$="{path.name}"]')
    assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
    outputs = [
        output
        for cell in json.loads(path.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    images = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(page.select("img")) >= len(images)
    for output in outputs:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            line = "".join(output["text"]).splitlines()[0].strip()
            assert line in page.get_text()


@pytest.mark.parametrize("word", ["freeze", "bf16", "optax", "FAQ", "parallel"])
def test_search_finds(word: str, site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    texts = [f"{entry['title']} {entry['text']}" for entry in index["docs"]]
    assert any(re.search(rf"\b{word}", text, re.IGNORECASE) for text in texts)


@pytest.fixture(scope="module")
def search(site: Path):
    """A function from what a reader types to the sections that are found, best first.

    As the theme's search does it in the browser, without its preview of words.
    """
    made = json.loads((site / "search" / "search_index.json").read_text())
    config = made["config"]
    assert config["pipeline"] == []  # no word is left out, and none is stemmed

    def words(html: str) -> list[str]:
        text = BeautifulSoup(html, "html.parser").get_text(" ")
        return [x.lower() for x in re.split(config["separator"], text) if x]

    builder = Builder()
    builder.b(0)
    builder.ref("location")
    for name, field in config["fields"].items():
        builder.field(
            name,
            boost=field["boost"],
            extractor=lambda doc, name=name: words(doc.get(name, "")),
        )
    for doc in made["docs"]:
        builder.add(doc, {"boost": doc.get("boost", 1)})
    index = builder.build()

    def search(typed: str) -> list[str]:
        return [x["ref"] for x in index.search(" ".join(f"{x}*" for x in words(typed)))]

    return search


@pytest.mark.parametrize(
    ("typed", "page", "section"),
    [
        ("requires_grad", "coming-from-pytorch/", ""),
        ("adamw", "faq/", ""),
        ("filter_jit", "api/transforms/", "equinox_like.filter_jit"),
        ("Array has been deleted", "faq/", "array-has-been-deleted"),
        ("is not a valid JAX type", "faq/", "is-not-a-valid-jax-type"),
        ("unhashable type", "faq/", "unhashable-type"),
        ("early stopping", "recipes/early-stopping/", ""),
        ("logging", "recipes/early-stopping/", ""),
        ("wandb", "recipes/early-stopping/", ""),
        ("gradient accumulation", "recipes/accumulation/", ""),
        ("large vocabulary", "recipes/large-vocabulary/", ""),
        ("GAN", "recipes/gan/", ""),
        ("VAE", "recipes/vae/", ""),
        ("PINN", "recipes/pinn/", ""),
        ("laplacian", "recipes/pinn/", ""),
        ("SwiGLU", "recipes/transformer-block/", ""),
        ("graph neural network", "recipes/graphs/", ""),
        ("hyperparameter sweep", "recipes/sweep/", ""),
        ("beam search", "recipes/sequence-to-sequence/", "beam-search"),
        ("label smoothing", "recipes/sequence-to-sequence/", "label-smoothing"),
        ("jit print", "printing/", ""),
        ("vmap key", "faq/", "with-a-key-in-place-of-keys"),
        ("list of layers", "modules/", "a-list-of-layers"),
        ("unexpected PRNG key type", "faq/", "unexpected-prng-key-type"),
        ("object is not callable", "faq/", "object-is-not-callable"),
        ("left padding", "generation/", "left-padding"),
    ],
)
def test_search_shows_first(typed: str, page: str, section: str, search) -> None:
    found, _, anchor = search(typed)[0].partition("#")
    assert found == page and section in anchor
