"""Continues a prompt with a model of Hugging Face.

python generate.py FOLDER TOKEN ...

The folder has `config.json`, and the weights in one or several files
`model*.safetensors`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gpt2
import jax
import jax.numpy as jnp
import llama
import numpy as np
from safetensors.numpy import load_file

import equinox_like as eqx

MODELS: dict[str, Any] = {
    "gpt2": (gpt2.GPT2, gpt2.NAMES, gpt2.convert),
    "llama": (llama.Llama, llama.NAMES, llama.convert),
}


def load(folder: str | Path) -> Any:
    """The model of a folder, in float32."""
    config = json.loads((Path(folder) / "config.json").read_text())
    make, names, convert = MODELS[config["model_type"]]
    theirs: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        theirs |= load_file(file)
    # The weights may be in bfloat16.
    theirs = {name: x.astype(np.float32) for name, x in theirs.items()}

    def rename(name: str) -> str:
        return ".".join(names.get(part, part) for part in name.split("."))

    # Shapes and dtypes only: nothing is initialised.
    model = eqx.filter_eval_shape(make, config, key=jax.random.key(0))
    return eqx.load_state_dict(model, convert(theirs, config), rename=rename)


if __name__ == "__main__":
    model = load(sys.argv[1])
    prompt = jnp.array([int(token) for token in sys.argv[2:]])
    caches = model.init_caches(len(prompt) + 20)
    out = eqx.nn.generate(model, prompt, caches, max_new_tokens=20, temperature=0)
    print(*out.tokens.tolist())
