"""Text from a saved model.

python examples/train_language_model/sample.py out/language_model/model
"""

import argparse
from pathlib import Path

import jax
from config import Config
from data import decode, encode
from model import make_model

import equinox_like as eqx


def load_model(path: Path):
    """The model of a file, which says by which settings it was built."""
    config = Config.from_json(eqx.load_metadata(path)["config"])
    template = eqx.filter_eval_shape(make_model, config, key=jax.random.key(0))
    return eqx.load(path, template, shardings=jax.devices()[0]), config


def sample(
    path: Path,
    prompt: str,
    *,
    length: int = 300,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """The prompt, and `length` bytes after it."""
    model, config = load_model(path)
    out = eqx.nn.generate(
        eqx.nn.inference_mode(model),
        encode(prompt),
        model.init_cache(config.context),
        max_new_tokens=length,
        key=jax.random.key(seed),
        temperature=temperature,
    )
    return prompt + decode(out.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print text from a saved model.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    print(sample(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
