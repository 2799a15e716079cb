"""Train a small language model on a CPU or GPU. Stopped, the same command resumes.

    python examples/train_language_model/train.py --out out/language_model

`--tiny` tries the code in seconds, and `--help` lists the settings.
"""

import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from config import Config, parse_args
from data import held_out_batches, load_data, training_batch
from log import Log
from sample import sample
from step import TrainState, evaluate, init_state, train_step
from tqdm import tqdm

import equinox_like as eqx
from equinox_like import orbax


def start(manager: ocp.CheckpointManager, config: Config) -> tuple[TrainState, dict]:
    """The state and the best evaluation so far: of the last checkpoint, or new ones."""
    best = {"step": 0, "loss": math.inf}
    last = manager.latest_step()
    if last is None:
        return init_state(config), best
    like = eqx.filter_eval_shape(init_state, config), best
    restored: Any = manager.restore(last, args=orbax.Restore(like))
    return restored


def train(config: Config, out: Path, stop_at: int | None) -> bool:
    """Whether training has come to its end, and was not stopped before."""
    tokens, held_out = load_data()
    held_out = held_out_batches(held_out, config)
    check_settings(out / "config.json", config)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(out / "checkpoints", options=options) as manager:
        state, best = start(manager, config)
        first = int(state.step)
        print(f"Step {first}: held-out loss {evaluate(state.ema, held_out):.4f}")
        log, metrics = Log(out, first), []
        steps = range(first, config.steps)
        progress = tqdm(steps, initial=first, total=config.steps, unit="step")
        for step in progress:
            if step == stop_at:
                return False
            if step - best["step"] >= config.patience:
                progress.write(f"No better loss than that of step {best['step']}.")
                break
            batches = training_batch(tokens, step, config)
            state, new = train_step(state, batches, config)
            metrics.append(new)  # reading it now would wait for the step
            done = step + 1
            if done % config.eval_every == 0 or done == config.steps:
                loss = float(evaluate(state.ema, held_out))
                numbers = {"held_out_loss": loss, **mean(metrics)}
                metrics.clear()
                log.write(done, numbers)
                if not math.isfinite(loss):
                    sys.exit(
                        f"The held-out loss of step {done} is {loss}. Try a smaller "
                        "--learning-rate, with another --out."
                    )
                progress.set_postfix({name: f"{x:.3g}" for name, x in numbers.items()})
                if loss < best["loss"]:
                    best = {"step": done, "loss": loss}
                    metadata = {"config": config.to_json()}
                    eqx.save(out / "model", state.ema.model(), metadata=metadata)
                manager.save(done, args=orbax.Save((state, best)))
    print(f"Step {best['step']}: held-out loss {best['loss']:.4f}, the best")
    return True


def mean(metrics: list[dict[str, jax.Array]]) -> dict[str, float]:
    values = jax.device_get(metrics)
    return {name: float(np.mean([x[name] for x in values])) for name in values[0]}


def check_settings(path: Path, config: Config) -> None:
    """Exits if the folder holds a run with other settings."""
    if not path.exists():
        path.write_text(config.to_json())
    elif (old := Config.from_json(path.read_text())) != config:
        changed = dict(vars(old).items() - vars(config).items())
        sys.exit(f"{path.parent} holds a run with {changed}. Pass another --out.")


def main() -> None:
    config, options = parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if train(config, out, options.stop_at):
        print(f"The model is in {options.out / 'model.safetensors'}. It writes:\n")
        print(sample(out / "model", options.prompt))
    else:
        print(f"Stopped at step {options.stop_at}: without --stop-at, it goes on.")


if __name__ == "__main__":
    main()
