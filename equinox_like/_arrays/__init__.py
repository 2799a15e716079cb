"""Layer 1: functions of single arrays; a sibling of `_tree`."""
