"""The models of `examples/hugging_face` agree with those of `transformers`, which made the
files in `tests/data/hugging_face` by `tests/data/make_hugging_face.py`.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file as save_jax_file
from safetensors.numpy import load_file, save_file

import equinox_like as eqx

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "hugging_face"
DATA = ROOT / "tests" / "data" / "hugging_face"
NAMES = "gpt2", "llama", "llama_scaled"


@pytest.fixture(scope="module")
def example():
    """The modules `gpt2`, `llama` and `generate`, whose files import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import generate

        yield generate
    for name in "generate", "gpt2", "llama":
        sys.modules.pop(name)


@pytest.fixture(params=NAMES)
def folder(request):
    return DATA / request.param


def copy_of(folder, tmp_path, arrays=None, **settings):
    """The folder with other arrays or settings; a setting that is None is left out."""
    config = json.loads((folder / "config.json").read_text()) | settings
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if arrays is None:
        shutil.copy(folder / "model.safetensors", tmp_path)
    else:
        save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path


def arrays_of(folder):
    return load_file(folder / "model.safetensors")


def assert_logits_agree(model, folder):
    expected = load_file(folder / "expected.safetensors")
    logits, caches = eqx.filter_jit(model)(jnp.array(expected["tokens"]))
    assert caches == [None, None]
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def test_logits_agree_with_the_original(example, folder):
    assert_logits_agree(example.load(folder), folder)


def test_cached_generation_gives_the_tokens_of_the_original(example, folder):
    expected = load_file(folder / "expected.safetensors")
    prompt, tokens = expected["prompt"], expected["generated"]
    model = example.load(folder)
    caches = model.init_caches(len(prompt) + len(tokens))
    out = eqx.nn.generate(
        model, prompt, caches, max_new_tokens=len(tokens), temperature=0
    )
    assert out.tokens.tolist() == tokens.tolist()


def test_script_prints_the_tokens():
    folder = DATA / "gpt2"
    expected = load_file(folder / "expected.safetensors")
    command = [sys.executable, "-W", "error", EXAMPLE / "generate.py", folder]
    prompt = [str(token) for token in expected["prompt"]]
    done = subprocess.run([*command, *prompt], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(token) for token in expected["generated"]]


def test_names_of_the_first_checkpoint_of_gpt2(example, tmp_path):
    theirs = {
        name.removeprefix("transformer."): x
        for name, x in arrays_of(DATA / "gpt2").items()
    }
    for i in range(2):  # buffers, which later versions do not save
        theirs[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), "f4"))
        theirs[f"h.{i}.attn.masked_bias"] = np.array(-1e4, "f4")
    folder = copy_of(DATA / "gpt2", tmp_path, theirs, tie_word_embeddings=None)
    assert eqx.tree_equal(example.load(folder), example.load(DATA / "gpt2"))


def test_settings_and_names_of_older_checkpoints_of_llama(example, tmp_path):
    theirs = arrays_of(DATA / "llama_scaled")
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    for i in range(2):
        theirs[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(8, "f4")
    config = json.loads((DATA / "llama_scaled" / "config.json").read_text())
    rope = config["rope_parameters"]
    folder = copy_of(
        DATA / "llama_scaled",
        tmp_path,
        theirs,
        rope_parameters=None,
        rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope,
    )
    assert eqx.tree_equal(example.load(folder), example.load(DATA / "llama_scaled"))


def test_several_files_in_bfloat16(example, tmp_path):
    theirs = {
        name: jnp.asarray(x, jnp.bfloat16)
        for name, x in arrays_of(DATA / "llama").items()
    }
    names = sorted(theirs)
    folder = copy_of(DATA / "llama", tmp_path)
    (folder / "model.safetensors").unlink()
    for i, part in enumerate((names[:5], names[5:]), 1):
        file = folder / f"model-0000{i}-of-00002.safetensors"
        save_jax_file({name: theirs[name] for name in part}, file)
    model = example.load(folder)
    assert model.head.weight.dtype == jnp.float32
    assert jnp.array_equal(model.head.weight, theirs["lm_head.weight"])


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_another_scaling_is_an_error(example, tmp_path, kind):
    rope = {kind: "linear", "factor": 2.0}
    folder = copy_of(DATA / "llama", tmp_path, rope_parameters=None, rope_scaling=rope)
    with pytest.raises(NotImplementedError, match="rope_type 'linear'"):
        example.load(folder)


@pytest.mark.parametrize("name", ["gpt2", "llama_scaled"])
def test_output_layer_of_a_tied_model_is_left_out(example, tmp_path, name):
    theirs = arrays_of(DATA / name) | {"lm_head.weight": np.ones((61, 48), "f4")}
    folder = copy_of(DATA / name, tmp_path, theirs)
    assert eqx.tree_equal(example.load(folder), example.load(DATA / name))


def test_output_layer_of_an_untied_model_is_read_or_an_error(example, tmp_path):
    head = {"lm_head.weight": np.ones((61, 48), "f4")}
    theirs = arrays_of(DATA / "llama_scaled") | head
    copy_of(DATA / "llama_scaled", tmp_path, theirs, tie_word_embeddings=False)
    assert jnp.array_equal(example.load(tmp_path).head.weight, jnp.ones((61, 48)))
    theirs = arrays_of(DATA / "gpt2") | head
    copy_of(DATA / "gpt2", tmp_path, theirs, tie_word_embeddings=False)
    with pytest.raises(eqx.LeafError, match="only in the mapping: `lm_head"):
        example.load(tmp_path)


def test_table_on_the_page_has_the_names(example):
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    rows = [
        [(re.findall("`(.*?)`", cell) or [""])[0] for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if re.match(r"\| `[\w.]+\.weight` \|", line)
    ]
    for kind, column in ("gpt2", 1), ("llama", 2):
        shown = {row[0]: row[column] for row in rows if row[column]}
        in_model = eqx.state_dict(example.load(DATA / kind))
        weights = {name for name in in_model if name.endswith("weight")}
        assert shown.keys() == {name for name in weights if ".1." not in name}
        names = example.MODELS[kind][1]
        for ours, theirs in shown.items():
            renamed = ".".join(names.get(part, part) for part in ours.split("."))
            assert theirs == re.sub("(query|key|value)_proj", "c_attn", renamed)
        there = {name.removeprefix("transformer.") for name in arrays_of(DATA / kind)}
        assert there >= {*shown.values()}
