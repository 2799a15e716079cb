"""Draws the pictures of the recipes, as PNG in `docs/images`.

They show what the programs of the pages compute.

python docs/scripts/draw_recipes.py [graphs] [sequence-to-sequence] [sweep]
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

DOCS = Path(__file__).resolve().parents[1]
BLUE, ORANGE = "#3949ab", "#ef6c00"


def run(recipe: str, until: str | None = None) -> dict[str, Any]:
    """The names that the program of a recipe defines, up to the heading `until`."""
    page = (DOCS / "recipes" / f"{recipe}.md").read_text()
    page = page.split(f"\n## {until}\n")[0]
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    return names


def save(name: str) -> None:
    plt.savefig(DOCS / "images" / f"{name}.png", dpi=144, bbox_inches="tight")
    plt.close()


def graphs() -> None:
    names = run("graphs", until="A batch of graphs")
    edges = names["edges"]
    adjacency = np.zeros((34, 34))
    adjacency[edges[:, 0], edges[:, 1]] = adjacency[edges[:, 1], edges[:, 0]] = 1
    places = layout(adjacency)
    sides = np.where(names["logits"].argmax(-1) == 1, BLUE, ORANGE)
    plt.figure(figsize=(6, 4.2))
    for a, b in edges:
        plt.plot(*places[[a, b]].T, color="0.75", lw=0.7, zorder=0)
    known = np.isin(np.arange(34), [0, 33])
    for marker, chosen in ("s", known), ("o", ~known):
        wrong = ~np.asarray(names["right"])[chosen]
        plt.scatter(
            *places[chosen].T,
            s=np.where(known[chosen], 190, 150),
            c=sides[chosen],
            marker=marker,
            edgecolors=np.where(wrong, "black", "white"),
            linewidths=np.where(wrong, 2.5, 0.8),
        )
    for i, place in enumerate(places):
        plt.annotate(str(i), place, color="white", fontsize=7, ha="center", va="center")
    plt.axis("off")
    save("graph")


def layout(adjacency: np.ndarray) -> np.ndarray:
    """Places of the nodes: neighbours attract each other, all others repel."""
    places = np.random.default_rng(0).normal(size=(len(adjacency), 2))
    for step in np.linspace(0.1, 0, 500):
        apart = places[:, None] - places
        distance = np.linalg.norm(apart, axis=-1) + np.eye(len(places))
        force = 0.1 / distance**2 - adjacency * distance
        moved = (apart * force[..., None]).sum(1)
        size = np.linalg.norm(moved, axis=1, keepdims=True)
        places += step * moved / np.maximum(size, 1e-3)
    return places


def sequence_to_sequence() -> None:
    names = run("sequence-to-sequence", until="Beam search")
    i = int(np.argmax(names["lengths"]))
    n, source = int(names["lengths"][i]), names["source"][i]
    decoder, memory = names["model"].decoder, names["model"].encoder(source, n)
    tokens = jnp.array([names["START"], *source[:n][::-1]])
    x = decoder.position(jax.vmap(decoder.embedding)(tokens))
    h = jax.vmap(decoder.block.norms[0])(x)
    x = x + decoder.block.attention(h, h, h, is_causal=True)
    h = jax.vmap(decoder.block.norms[1])(x)
    mask = names["eqx"].nn.padding_mask(n, len(memory), query_length=len(tokens))
    attention = decoder.block.cross_attention
    _, weights = attention(h, memory, memory, mask, return_weights=True)
    letters = ["abcdefghij"[token - 3] for token in source[:n]]
    plt.figure(figsize=(4, 4))
    plt.imshow(weights.mean(0)[:, :n], cmap="Blues", vmin=0, vmax=1)
    plt.xticks(range(n), letters)
    plt.yticks(range(n + 1), [*letters[::-1], "end"])
    plt.xlabel("source")
    plt.ylabel("output")
    plt.colorbar(label="weight, mean over the heads", shrink=0.8)
    save("attention")


def sweep() -> None:
    names = run("sweep")
    rates, last = names["rates"], names["last"]
    plt.figure(figsize=(5.5, 3.5))
    plt.plot(rates, last, ".-", color="0.75", lw=0.8)
    plt.plot([], [], ".-", color="0.75", label="one fold")
    plt.plot(rates, last.mean(1), "o-", color=BLUE, label="mean of the folds")
    plt.xscale("log")
    plt.yscale("log")
    plt.xlabel("learning rate")
    plt.ylabel("loss on the fold that is left out")
    plt.legend()
    plt.grid(alpha=0.3)
    save("sweep")


PICTURES: dict[str, Callable[[], None]] = {
    "graphs": graphs,
    "sequence-to-sequence": sequence_to_sequence,
    "sweep": sweep,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
