"""The settings of a run, and the command line that sets them.

A frozen dataclass can be hashed, so compiled functions take it as a static argument. As
JSON it is stored beside the checkpoints, and in the file of the model.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Config:
    # The model
    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128  # how many bytes it sees at once
    dropout: float = 0.1
    precision: str = "params=f32,compute=bf16,output=f32"
    # The optimiser
    steps: int = 1000
    batch_size: int = 16  # sequences in a micro-batch
    micro_batches: int = 2  # in a step: their gradients are averaged
    learning_rate: float = 3e-3
    warmup: int = 100  # steps
    weight_decay: float = 0.1
    max_norm: float = 1.0  # of the gradient, which is clipped
    ema_decay: float = 0.99  # of the averaged model, which is evaluated and saved
    # Evaluation
    eval_every: int = 100  # steps; a checkpoint is written, too
    patience: int = 300  # training ends after as many steps without a better loss
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Config":
        return cls(**json.loads(text))


TINY: dict[str, Any] = {
    "width": 16,
    "depth": 2,
    "heads": 2,
    "context": 32,
    "steps": 50,
    "batch_size": 8,
    "warmup": 5,
    "learning_rate": 1e-2,
    "eval_every": 10,
    "patience": 30,
}


def parse_args() -> tuple[Config, argparse.Namespace]:
    """The settings, and the options that do not change what is trained."""
    parser = argparse.ArgumentParser(
        description="Train a small language model. A run that was stopped continues."
    )
    out = Path("out/language_model")
    parser.add_argument("--out", type=Path, default=out, help=f"by default {out}")
    parser.add_argument("--stop-at", type=int, help="a step, to continue later")
    parser.add_argument("--prompt", default="The ", help="the start of the sample")
    parser.add_argument(
        "--mesh",
        default="data=-1,model=1",
        help="how many devices share the batch, and how many a weight; -1: the rest",
    )
    parser.add_argument("--coordinator", help="address of process 0, as host:port")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="the number of this one, from 0")
    parser.add_argument(
        "--cluster", action="store_true", help="let JAX ask Slurm or the like for these"
    )
    parser.add_argument("--tiny", action="store_true", help="settings to test the code")
    fields = parser.add_argument_group("settings")
    for field in dataclasses.fields(Config):
        fields.add_argument(
            "--" + field.name.replace("_", "-"),
            type=type(field.default),
            default=argparse.SUPPRESS,
            help=f"by default {field.default}",
        )
    options = parser.parse_args()
    names = {field.name for field in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return Config(**(TINY if options.tiny else {}) | given), options
