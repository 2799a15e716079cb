"""Train a small language model on a CPU or GPU. Stopped, the same command resumes.

    python examples/train_language_model/train.py --out out/language_model

On several devices, `--mesh data=4,model=2` says how they share the work. As one of several
processes, add `--coordinator HOST:PORT --processes 2 --process 0`, or `--cluster`. `--tiny`
tries the code in seconds, and `--help` lists the settings.
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
from jax.sharding import NamedSharding, PartitionSpec
from layout import make_layout, own_rows
from log import Log
from sample import sample
from step import TrainState, evaluate, init_state, train_step
from tqdm import tqdm

import equinox_like as eqx
from equinox_like import orbax


def start(
    manager: ocp.CheckpointManager, config: Config, layout: eqx.Layout
) -> tuple[TrainState, dict]:
    """The state and the best evaluation so far: of the last checkpoint, or new ones."""
    best = {"step": 0, "loss": math.inf}
    last = manager.latest_step()
    if last is None:
        return layout.init(init_state, config), best
    like = eqx.filter_eval_shape(init_state, config), best
    where = layout.shardings(like[0]), None  # the mesh may be another one than before
    restored: Any = manager.restore(last, args=orbax.Restore(like, shardings=where))
    return restored


def train(config: Config, out: Path, mesh: str, stop_at: int | None) -> bool:
    """Whether training has come to its end, and was not stopped before."""
    is_writer = jax.process_index() == 0  # of log and model
    layout = make_layout(mesh)
    run_step = layout.jit(train_step, donate=("state",))
    run_evaluation = layout.jit(evaluate)
    on_each = NamedSharding(layout.mesh, PartitionSpec())
    averaged = eqx.filter_jit(lambda ema: ema.model(), out_shardings=on_each)
    tokens, held_out = load_data()
    held_out = layout.batch(own_rows(held_out_batches(held_out, config)))
    if is_writer:
        check_settings(out / "config.json", config)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(out / "checkpoints", options=options) as manager:
        state, best = start(manager, config, layout)
        first = int(state.step)
        report(f"Step {first}: held-out loss {run_evaluation(state.ema, held_out):.4f}")
        log, metrics = Log(out, first) if is_writer else None, []
        steps = range(first, config.steps)
        progress = tqdm(
            steps, initial=first, total=config.steps, unit="step", disable=not is_writer
        )
        for step in progress:
            if step == stop_at:
                report(f"Stopped at step {step}: without --stop-at, it goes on.")
                return False
            if step - best["step"] >= config.patience:
                progress.write(f"No better loss than that of step {best['step']}.")
                break
            batches = layout.batch(own_rows(training_batch(tokens, step, config)))
            state, new = run_step(state, batches, config)
            metrics.append(new)  # reading it now would wait for the step
            done = step + 1
            if done % config.eval_every == 0 or done == config.steps:
                loss = float(run_evaluation(state.ema, held_out))
                numbers = {"held_out_loss": loss, **mean(metrics)}
                metrics.clear()
                if log is not None:
                    log.write(done, numbers)
                if not math.isfinite(loss):
                    sys.exit(
                        f"The held-out loss of step {done} is {loss}. Try a smaller "
                        "--learning-rate, with another --out."
                    )
                progress.set_postfix({name: f"{x:.3g}" for name, x in numbers.items()})
                if loss < best["loss"]:
                    best = {"step": done, "loss": loss}
                    model = averaged(state.ema)
                    if is_writer:
                        metadata = {"config": config.to_json()}
                        eqx.save(out / "model", model, metadata=metadata)
                manager.save(done, args=orbax.Save((state, best)))
            elif manager.reached_preemption(done):  # SIGTERM, in one of the processes
                manager.save(done, args=orbax.Save((state, best)), force=True)
                report(f"Stopped at step {done}: the same command goes on.")
                return False
    report(f"Step {best['step']}: held-out loss {best['loss']:.4f}, the best")
    return True


def report(text: str) -> None:
    if jax.process_index() == 0:
        print(text)


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
    if options.cluster or options.coordinator is not None:
        # Before anything else of JAX.
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process
        )
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    is_done = train(config, out, options.mesh, options.stop_at)
    if is_done and jax.process_index() == 0:
        print(f"The model is in {options.out / 'model.safetensors'}. It writes:\n")
        print(sample(out / "model", options.prompt))


if __name__ == "__main__":
    main()
