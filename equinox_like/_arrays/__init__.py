"""Functions of single arrays; a sibling of `_tree`."""
