"""The log: a CSV file, and TensorBoard where a writer for it is installed."""

import csv
import importlib
from pathlib import Path


class Log:
    """Writes numbers to `folder/log.csv`, a row for each evaluation."""

    def __init__(self, folder: Path, step: int):
        """Continues after `step`. A run that was stopped may have logged later rows."""
        self.path = folder / "log.csv"
        lines = self.path.read_text().splitlines(keepends=True) if step > 0 else []
        kept = [row for row in lines[1:] if int(row.partition(",")[0]) <= step]
        self.path.write_text("".join(lines[:1] + kept))
        self.board = summary_writer(folder / "tensorboard", purge_step=step + 1)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        row = {"step": step, **numbers}
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


def summary_writer(folder: Path, purge_step: int):
    for name in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return module.SummaryWriter(str(folder), purge_step=purge_step)
    return None
