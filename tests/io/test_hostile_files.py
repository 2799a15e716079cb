"""Whatever is in a file, loading it ends soon: in a clear error, or in what was saved."""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from strategies import same

import equinox_like as eqx
from equinox_like._io.format import Tensor, header as header_of

TREE = {
    "weight": jnp.arange(40.0).reshape(5, 8),
    "half": jnp.ones(3, jnp.bfloat16),
    "key": jax.random.key(7),
    "host": np.arange(3),
    "step": 12,
    "rate": 0.5,
    "name": "static",
}


class Format(NamedTuple):
    save: Callable[[str, Any], None]
    load: Callable[[str, Any], Any]
    suffix: str


FORMATS = {
    "safetensors": Format(eqx.save, eqx.load, ".safetensors"),
    "eqx": Format(eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves, ".eqx"),
}


@pytest.fixture(params=FORMATS, scope="module")
def sound(request, tmp_path_factory):
    """A format, and the bytes of a sound file in it."""
    form = FORMATS[request.param]
    path = tmp_path_factory.mktemp("sound") / f"saved{form.suffix}"
    form.save(str(path), TREE)
    return form, path, path.read_bytes()


def load_bytes(form: Format, path: Path, raw: bytes) -> Any:
    bad = path.with_name(f"bad{form.suffix}")
    bad.write_bytes(raw)
    return form.load(str(bad), TREE)


def ends_well(form: Format, path: Path, raw: bytes) -> bool:
    """Whether an error came, which must be a clear one; else all must be as saved."""
    try:
        loaded = load_bytes(form, path, raw)
    except RuntimeError as error:
        assert len(str(error)) > 20
        return True
    assert all(map(same, jtu.tree_leaves(loaded), jtu.tree_leaves(TREE)))
    return False


@given(data=st.data())
def test_every_cut_is_an_error(sound, data):
    form, path, raw = sound
    size = data.draw(st.integers(0, len(raw) - 1))
    is_error = ends_well(form, path, raw[:size])
    # A file of ours without its record of checksums is one that Equinox writes.
    assert is_error != (form.suffix == ".eqx" and size == _end_of_data(raw))


def _end_of_data(raw):
    """Where the last array of an .eqx file ends, and the record begins."""
    return raw.rindex(b"\x93NUMPY")


@pytest.mark.parametrize("sound", ["eqx"], indirect=True)
def test_cut_that_leaves_all_data_is_a_file_of_equinox(sound):
    form, path, raw = sound
    assert not ends_well(form, path, raw[: _end_of_data(raw)])


@given(data=st.data())
def test_whatever_is_appended_is_an_error(sound, data):
    form, path, raw = sound
    assert ends_well(form, path, raw + data.draw(st.binary(min_size=1, max_size=99)))


@given(data=st.data())
def test_flipped_bit_is_an_error_or_changes_nothing(sound, data):
    form, path, raw = sound
    position = data.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[position // 8] ^= 1 << position % 8
    ends_well(form, path, bytes(flipped))


def test_each_bit_of_the_data_counts(sound):
    form, path, raw = sound
    start = raw.index(np.asarray(TREE["weight"]).tobytes())
    for position in range(start, start + 160, 7):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(eqx.LeafError, match=r"\['weight'\].*damaged") as caught:
            load_bytes(form, path, bytes(flipped))
        assert jtu.keystr(caught.value.path) == "['weight']"


def test_without_verification_flipped_data_are_still_data(tmp_path):
    eqx.save(tmp_path / "m", TREE)
    path = tmp_path / "m.safetensors"
    raw = bytearray(path.read_bytes())
    raw[raw.index(np.asarray(TREE["weight"]).tobytes()) + 6] ^= 1
    path.write_bytes(raw)
    loaded = eqx.load(path, TREE, verify=False)
    assert loaded["weight"].shape == (5, 8)
    assert not same(loaded["weight"], TREE["weight"])


@given(st.binary(max_size=300))
def test_foreign_bytes_are_an_error(sound, raw):
    form, path, _ = sound
    assert ends_well(form, path, raw)


@given(data=st.data())
def test_replaced_stretch_ends_well(sound, data):
    form, path, raw = sound
    start = data.draw(st.integers(0, len(raw)))
    stretch = data.draw(st.binary(max_size=40))
    ends_well(form, path, raw[:start] + stretch + raw[start + len(stretch) :])


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickles() -> dict[str, bytes]:
    array = np.array([Exploit()], dtype=object)
    path = Path("pickled.npy")
    np.save(path, array, allow_pickle=True)
    return {"pickle": pickle.dumps(Exploit()), "npy": path.read_bytes()}


@pytest.mark.parametrize("kind", ["pickle", "npy"])
def test_no_pickle_is_run(sound, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form, path, _ = sound
    assert ends_well(form, path, pickles()[kind])
    assert not Path("executed").exists()


def safetensors_file(header: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def npy_file(header: str, data: bytes = b"", size: int | None = None) -> bytes:
    length = struct.pack("<I", len(header) if size is None else size)
    return b"\x93NUMPY\x02\x00" + length + header.encode() + data


def entry(shape: Any, offsets: Any, dtype: str = "F32") -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


OWN = {"version": 1, "leaves": {"['weight']": {"dtype": "object"}}}
HOSTILE = {
    "safetensors": [
        safetensors_file({}, size=2**63),
        safetensors_file({}, size=2**40),
        safetensors_file(b"[" * 200_000),
        safetensors_file(b'{"a":' * 100_000),
        safetensors_file({"['weight']": entry([5, 8], [0, 2**62])}),
        safetensors_file({"['weight']": entry([2**32, 2**32], [0, 160])}, bytes(160)),
        safetensors_file({"['weight']": entry([5, 8], [160, 0])}, bytes(160)),
        *(
            safetensors_file({"['weight']": entry([5, 8], offsets)}, bytes(160))
            for offsets in ([0.16], [0, 1e999], [0, -1e999], [1, "a"], [[], []], {}, 3)
        ),
        safetensors_file([1], bytes(160)),
        safetensors_file({"['weight']": entry([-5, -8], [0, 160])}, bytes(160)),
        safetensors_file({"['weight']": entry([5, 8], [0, 160], "OBJECT")}, bytes(160)),
        safetensors_file({"['weight']": entry([5.5, 8], [0, 160])}, bytes(160)),
        safetensors_file({"../../etc/passwd": entry([1], [0, 4])}, bytes(4)),
        safetensors_file({"['weight']": 3}),
        safetensors_file({"__metadata__": {"equinox_like": "[" * 100_000}}),
        safetensors_file({"__metadata__": {"equinox_like": "{}"}}),
        safetensors_file({"__metadata__": {"equinox_like_sum": ""}}),
        safetensors_file(
            {
                "__metadata__": {"equinox_like": json.dumps(OWN)},
                "['weight']": entry([40], [0, 160]),
            },
            bytes(160),
        ),
    ],
    "eqx": [
        npy_file("", size=2**32 - 1),
        npy_file("{" * 5000),
        npy_file("(" * 9000 + ")" * 9000),
        npy_file("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}"),
        npy_file(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62},)}}"),
        npy_file(
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99)}"
        ),
        npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        npy_file("{'descr': '<V9999999999', 'fortran_order': False, 'shape': ()}"),
        npy_file("{'descr': __import__('os').mkdir('executed'), 'shape': ()}"),
        npy_file("9" * 9000),
        npy_file("'x' * 10**10"),
        b'", "record_bytes": 99999999999999999999}',
        b"[" * 100_000 + b'", "record_bytes": 100039}',
    ],
}


@pytest.mark.parametrize(
    ("kind", "number"),
    [(kind, i) for kind, files in HOSTILE.items() for i in range(len(files))],
)
def test_hostile_file_is_an_error(kind, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = FORMATS[kind]
    assert ends_well(form, tmp_path / "x", HOSTILE[kind][number])
    assert not Path("executed").exists()


@pytest.mark.parametrize(("impl", "words"), [("rbg", 4), ("threefry2x32", 3)])
def test_keys_that_are_not_what_the_file_says_are_an_error(tmp_path, impl, words):
    kind = {"dtype": "key<fry>", "key": impl}
    data = np.zeros(4 * words, np.uint8)
    head = header_of({}, [("['key']", Tensor("U32", (words,), kind), data)])
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + data.tobytes())
    with pytest.raises(eqx.LeafError, match=r"\['key'\]: it has keys .* not key<fry>"):
        eqx.load(path, {"key": TREE["key"]})


@pytest.mark.parametrize(
    ("dtype", "match"),
    [
        ("float3", r"`\['x'\]` is float3\[2\] in the file, but float32\[2\]"),
        ("complex64", r"data of `\['x'\]` do not fit the dtype and shape"),
        (3, "description of the tensors is inconsistent"),
    ],
)
def test_dtype_that_is_unknown_or_not_that_of_the_data_is_an_error(
    tmp_path, dtype, match
):
    data = np.zeros(8, np.uint8)
    head = header_of({}, [("['x']", Tensor("U8", (2, 4), {"dtype": dtype}), data)])
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + data.tobytes())
    with pytest.raises(RuntimeError, match=match):
        eqx.load(path, {"x": jnp.zeros(2)})


def test_record_of_an_unknown_version_is_an_error():
    file = io.BytesIO(b"\x93NUMPY\x04" + npy_file("")[7:])
    with pytest.raises(eqx.LeafError, match=r"the unknown `\.npy` version 4$"):
        eqx.tree_deserialise_leaves(file, jnp.zeros(2))


BOUNDED = """
import resource, sys, time
import jax
jax.device_put([])  # JAX takes its own memory first
import test_hostile_files as hostile
from pathlib import Path

limit = 300 << 20
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
for kind, files in hostile.HOSTILE.items():
    for raw in files:
        start = time.process_time()
        assert hostile.ends_well(hostile.FORMATS[kind], Path("x"), raw)
        assert time.process_time() - start < 5
print("bounded")
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS"), reason="no limit to set here")
def test_hostile_files_take_neither_time_nor_memory(tmp_path):
    here = Path(__file__).parent
    paths = [here, here.parent, Path(eqx.__file__).parents[1]]
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert done.stdout == "bounded\n", done.stderr


def test_names_that_are_not_in_the_tree_are_listed(tmp_path):
    names = {f"nowhere{i}": np.zeros(1, "float32") for i in range(100)}
    safetensors.numpy.save_file(names, tmp_path / "x.safetensors")
    with pytest.raises(eqx.LeafError, match=r"only in the file: `nowhere0`.* 80 more"):
        eqx.load(tmp_path / "x.safetensors", TREE)


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_foreign_bools_are_true_or_false(tmp_path, form):
    bad = np.array([0, 1, 2], np.uint8).view(np.bool_)
    if form == "npy":
        np.save(tmp_path / "bad.npy", bad)
        load = eqx.tree_deserialise_leaves
    else:
        safetensors.numpy.save_file({"[0]": bad}, tmp_path / "bad.safetensors")
        load = eqx.load
    path = next(tmp_path.iterdir())
    with pytest.raises(eqx.LeafError, match=r"\[0\].*damaged"):
        load(path, [jnp.zeros(3, bool)])
