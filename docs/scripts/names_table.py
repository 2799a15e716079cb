"""Prints the table of names for docs/coming-from-pytorch.md: run it after a change there.

It is the table with which `nn.ReLU` and the like are answered. A test compares the two.
"""

from equinox_like._public import TABLE, find

# Names that are in no row, because they are looked up.
LOOKED_UP = "Module", "ReLU", "softmax", "jit", "value_and_grad", "scan"


def table() -> str:
    rows = TABLE | {name: find(name) for name in LOOKED_UP}
    lines = ["| name | use |", "|---|---|"]
    for names, answer in rows.items():
        shown = ", ".join(f"`{name}`" for name in names.split())
        lines.append(f"| {shown} | {answer} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
