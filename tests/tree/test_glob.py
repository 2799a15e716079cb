import pytest

from equinox_like._tree.paths import _compiled, matches, matches_above


@pytest.mark.parametrize(
    ("pattern", "path", "whole"),
    [
        ("layers[0].weight", "layers[0].weight", True),
        (".layers[0].weight", "layers[0].weight", True),
        ("layers[*].weight", "layers[12].weight", True),
        ("layers[*].weight", "layers[1].inner.weight", False),
        ("layers[*].*", "layers[1].bias", True),
        ("*.weight", "layers[1].weight", False),
        ("**.weight", "weight", True),
        ("**.weight", "layers[1].inner.weight", True),
        ("**.weight", "layers[1].overweight", False),
        ("layers**", "layers[1].weight", True),
        ("['a'].*", "['a'].weight", True),
        ("[*].weight", "['a'].weight", True),
        ("layers[0]", "layers[0].weight", False),
        ("weigh.", "weight", False),
        ("[*].weight", "['layers[0].mlp'].weight", True),
        ("['layers[0].*'].weight", "['layers[0].mlp'].weight", True),
        ("['layers[0].*'].weight", "['layers[0]'].mlp.weight", False),
        ("**.weight", "['mlp.weight']", False),
        ("**['mlp.weight']", "layers['mlp.weight']", True),
        ("[*]", """["it's"]""", True),
        ("[*]", """['"it\\'s" a.b']""", True),
        (r"['\*']", "['*']", True),
        (r"['\*']", "['a']", False),
        (r"['\*\*'].**", "['**'].weight", True),
        (r"['\*\*']", "['*']", False),
        (r"['a\*.*']", "['a*.b']", True),
        (r"['\\\*']", r"['\\*']", True),
        (r"['\\*']", r"['\\b']", True),
        ("", "", True),
        ("**", "", True),
        ("*", "", False),
        ("**.*", "", False),
    ],
)
def test_pattern_is_the_whole_of_a_path(pattern, path, whole) -> None:
    assert matches(pattern, path) is whole


@pytest.mark.parametrize(
    ("pattern", "path", "above"),
    [
        ("layers[0]", "layers[0].weight", True),
        ("layers", "layers[0].weight", True),
        ("layer", "layers[0].weight", False),
        ("layers[1]", "layers[12].weight", False),
        ("**.inner", "a.inner.b.c", True),
        ("['a']", "['a'][0]", True),
        ("layers[0].weight", "layers[0].weight", True),
        (".layers[0]", "layers[0].weight", True),
        ("layers[0]*", "layers[0].weight", True),
        ("[*]", "['a.b']['c.d'].weight", True),
        ("['a*", "['a.b'].weight", False),
        ("*a", "['a.b'].weight", False),
        ("layers[0].weight.inner", "layers[0].weight", False),
        ("weight", "", False),
        ("", "weight", False),
        ("", "[0]", False),
        ("", "", True),
    ],
)
def test_pattern_is_a_node_above_a_path(pattern, path, above) -> None:
    assert matches_above(pattern, path) is above


def test_many_patterns_are_compiled_once_each() -> None:
    patterns = [f"layers[{i}].*" for i in range(600)]
    for _ in range(2):
        assert all(matches(p, p.replace("*", "weight")) for p in patterns)
    found = _compiled.cache_info()
    assert found.currsize >= 600 and found.hits >= 600
