"""The example of several processes, with two of them, agrees with one; the recipes for
several devices run on eight."""

from pathlib import Path

import numpy as np
import pytest
from processes import finish, free_port, start
from test_docs import blocks_of

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "data_parallel.py"


def test_two_processes_agree_with_one(tmp_path):
    alone, together = tmp_path / "one.npz", tmp_path / "two.npz"
    printed = finish(start(EXAMPLE, "--steps", 5, "--out", alone, devices=1))
    assert "process 0 of 1, 1 of 1 devices" in printed
    address = f"127.0.0.1:{free_port()}"
    common = ("--steps", 5, "--coordinator", address, "--processes", 2)
    processes = [
        start(EXAMPLE, *common, "--process", i, "--out", together, devices=2)
        for i in range(2)
    ]
    outputs = [finish(process) for process in processes]
    for i, out in enumerate(outputs):
        assert f"process {i} of 2, 2 of 4 devices" in out
    losses = [float(out.split("loss")[1]) for out in (*outputs, printed)]
    assert losses[0] == losses[1] and abs(losses[0] - losses[2]) < 1e-5
    with np.load(alone) as one, np.load(together) as two:
        assert one.files == two.files and len(one.files) == 12
        for name in one.files:
            assert np.allclose(one[name], two[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("page", ["layout", "recipes/several-devices"])
def test_programs_of_the_pages_run_on_eight_devices(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one of them saves a model
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    for number, (_, code) in enumerate(blocks_of(text)):
        script = tmp_path / f"{number}.py"
        script.write_text(code)
        finish(start(script, devices=8))
