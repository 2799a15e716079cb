"""The examples do what they say: the main job at its full size, the language model with
tiny settings, and the notebooks.

All notebooks are executed by `.ci/run`. Here the quickstart is, which is fast, and the
stored outputs of the others are inspected.
"""

import csv
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from processes import finish, free_port, start

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
A_PATH_OF_A_MACHINE = re.compile(
    r"/(home|root|tmp|work|opt|usr|var|Users)/|[A-Z]:\\\\?Users|site-packages"
)


def run(script, *options, status=0, **environment):
    """What the script prints; for another status, what it says of the error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, options)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def run_digits(out, *options):
    return run("train_digits.py", "--out", out, *options)


def test_digits_are_learnt_donated_saved_and_drawn(tmp_path):
    printed = run_digits(tmp_path)
    accuracy = re.search(r"Test accuracy: ([\d.]+)% of 360 images", printed)
    assert accuracy is not None and float(accuracy[1]) >= 97.0
    found = re.search(r"at most ([\d,]+) bytes .* alive, ([\d,]+) without", printed)
    live, without = (int(number.replace(",", "")) for number in found.groups())
    # One copy of model and optimiser state instead of two.
    assert 0.49 < live / without < 0.51
    found = re.findall(r"(\d+)% (?:of .* layer|with one) of (\d+)", printed)
    saved = {int(width): int(percent) for percent, width in found}
    assert list(saved) == [4096, 1024, 256]
    assert saved[256] >= 0 and saved[1024] >= 10 and saved[4096] >= 20
    assert "equal to the bit: True" in printed
    assert (tmp_path / "digits.eqx").stat().st_size > 100_000
    assert_picture(tmp_path / "digits.png")


def test_options_of_the_main_job_work(tmp_path):
    printed = run_digits(tmp_path, "--epochs", "1", "--seed", "3", "--batch-size", "64")
    heads = [line.split(":")[0].split(" saves")[0] for line in printed.splitlines()]
    assert heads[:4] == ["Test accuracy", "Training loss", *["Donation"] * 2]
    assert heads[4].startswith("Saved to") and heads[5:] == ["Picture"]
    assert "equal to the bit: True" in printed
    assert_picture(tmp_path / "digits.png")


def assert_picture(path):
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 20_000
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (1430, 1105)


LANGUAGE_MODEL = "train_language_model/train.py"
# It takes the place of tensorboardX, which is not among what the tests need.
WRITER = """
class SummaryWriter:
    def __init__(self, folder, purge_step):
        self.file = open(folder + ".txt", "a")
        print("from", purge_step, file=self.file)

    def add_scalar(self, name, value, step):
        print(step, name, repr(value), file=self.file)

    def flush(self):
        self.file.flush()
"""


def rows_of(log):
    return list(csv.DictReader(log.read_text().splitlines()))


def test_language_model_that_is_stopped_and_resumed_is_that_of_a_whole_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = run(LANGUAGE_MODEL, "--tiny", "--out", whole)
    rows = rows_of(whole / "log.csv")
    assert [row["step"] for row in rows] == ["10", "20", "30", "40", "50"]
    losses = [float(row["held_out_loss"]) for row in rows]
    # A byte out of 256 has log 256 = 5.5 nats; a third of the text are spaces and "e".
    assert losses == sorted(losses, reverse=True) and losses[-1] < 3.5
    assert float(re.search(r"Step 0: held-out loss ([\d.]+)", printed)[1]) > 5
    assert f"Step 50: held-out loss {losses[-1]:.4f}, the best" in printed

    (tmp_path / "tensorboardX.py").write_text(WRITER)
    options = ("--tiny", "--out", parts)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    stopped = run(LANGUAGE_MODEL, *options, "--stop-at", 25, PYTHONPATH=path)
    assert "Stopped at step 25" in stopped
    with (parts / "log.csv").open("a") as file:
        file.write("30,0.0,0.0,0.0,0.0\n")  # as if it had been killed at step 35
    resumed = run(LANGUAGE_MODEL, *options, PYTHONPATH=path)
    assert "Step 20: held-out loss" in resumed
    for name in ("log.csv", "model.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    written = [text.partition("It writes:")[2] for text in (printed, resumed)]
    assert written[0] == written[1] and written[0].startswith("\n\nThe ")

    board = (parts / "tensorboard.txt").read_text().splitlines()
    assert [line for line in board if line.startswith("from")] == ["from 1", "from 21"]
    values = [f"{row['step']} held_out_loss {row['held_out_loss']}" for row in rows]
    assert [line for line in board if "held_out_loss" in line] == values

    refused = run(LANGUAGE_MODEL, *options, "--width", 32, status=1)
    assert f"{parts} holds a run with {{'width': 16}}. Pass another --out." in refused


# Where no sum is rounded to bfloat16.
EXACT = ("--tiny", "--steps", 20, "--precision", "params=f32,compute=f32,output=f32")


def start_together(*options, port):
    """The example in two processes with two devices each."""
    address = "--coordinator", f"127.0.0.1:{port}", "--processes", 2
    script = EXAMPLES / LANGUAGE_MODEL
    return [
        start(script, *options, *address, "--process", i, devices=2) for i in range(2)
    ]


def test_language_model_on_other_meshes_has_the_losses_of_one_device(tmp_path):
    out = {name: tmp_path / name for name in ("one", "eight", "processes")}
    flag = "--xla_force_host_platform_device_count"
    run(LANGUAGE_MODEL, *EXACT, "--out", out["one"], XLA_FLAGS=f"{flag}=1")
    # Eight devices, of which the second part of the run makes another mesh.
    parts = {"data=4,model=2": ("--stop-at", 15), "data=2,model=4": ()}
    for mesh, stop in parts.items():
        options = ("--out", out["eight"], "--mesh", mesh, *stop)
        run(LANGUAGE_MODEL, *EXACT, *options, XLA_FLAGS=f"{flag}=8")
    options = ("--out", out["processes"], "--mesh", "data=-1,model=2")
    for process in start_together(*EXACT, *options, port=free_port()):
        finish(process)
    one, *others = (rows_of(folder / "log.csv") for folder in out.values())
    for rows in others:
        for row, expected in zip(rows, one, strict=True):
            for name in row:
                assert float(row[name]) == pytest.approx(
                    float(expected[name]), rel=1e-4
                )
    text = run("train_language_model/sample.py", out["processes"] / "model")
    assert text.startswith("The ")


def test_language_model_saves_when_one_process_is_told_to_end(tmp_path):
    endless = ("--tiny", "--steps", 100_000, "--eval-every", 50_000)
    options = (*endless, "--patience", 100_000, "--out", tmp_path)
    processes = start_together(*options, port=free_port())
    while not (tmp_path / "config.json").exists():  # written as training starts
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)
    time.sleep(5)
    processes[1].terminate()
    for process in processes:
        assert "Stopped" in finish(process) or process is processes[1]
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    text = run(LANGUAGE_MODEL, *options, "--stop-at", saved + 1)
    assert f"Step {saved}: held-out loss" in text


def test_language_model_stops_early_and_its_file_is_sampled(tmp_path):
    small = ("--tiny", "--depth", 1, "--micro-batches", 1)
    out = ("--out", tmp_path, "--prompt", "If ")
    small += ("--learning-rate", 0)
    run(LANGUAGE_MODEL, *small, *out, "--stop-at", 25)
    printed = run(LANGUAGE_MODEL, *small, *out)
    assert "Step 10: held-out loss" in printed  # it learns nothing after the first
    rows = rows_of(tmp_path / "log.csv")
    assert [row["step"] for row in rows] == ["10", "20", "30", "40"]
    assert len({row["held_out_loss"] for row in rows}) == 1
    text = run("train_language_model/sample.py", tmp_path / "model", "--prompt", "If ")
    assert printed.endswith(f"It writes:\n\n{text}") and text.startswith("If ")


def test_text_too_short_for_a_held_out_batch_is_refused_with_the_sizes(tmp_path):
    copy = shutil.copytree((EXAMPLES / LANGUAGE_MODEL).parent, tmp_path / "copy")
    data = (copy / "data.py").read_text()
    own = data.replace("topics.values()", '["Some short text. " * 1000]')
    assert own != data
    (copy / "data.py").write_text(own)
    small = ("--depth", 1, "--width", 16, "--heads", 2, "--out", tmp_path / "out")
    error = run(copy / "train.py", *small, status=1)
    assert "held-out text has 1,700 bytes, and a batch takes 16 x 129 = 2,064." in error
    assert not list((tmp_path / "out").iterdir())  # the settings may still be changed


def test_loss_that_is_not_finite_ends_the_run_with_a_sentence(tmp_path):
    small = ("--tiny", "--depth", 1, "--micro-batches", 1, "--learning-rate", 1e30)
    error = run(LANGUAGE_MODEL, *small, "--out", tmp_path, status=1)
    assert re.search(r"\nThe held-out loss of step 10 is (nan|inf)\. Try", error)
    assert [row["step"] for row in rows_of(tmp_path / "log.csv")] == ["10"]
    assert not (tmp_path / "model.safetensors").exists()


def test_page_of_the_language_model_shows_the_code_of_its_files():
    files = [
        path.read_text() for path in (EXAMPLES / LANGUAGE_MODEL).parent.glob("*.py")
    ]
    page = EXAMPLES.parent / "docs" / "train-a-language-model.md"
    blocks = re.findall(
        r"^```py\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) > 5
    # What is within a function or a loop is shown without its indentation.
    wanted = [
        [textwrap.indent(block, " " * n) for n in (0, 4, 8, 12)] for block in blocks
    ]
    assert all(any(each in "".join(files) for each in block) for block in wanted)


# The kernel's messages come in through libraries that warn of their own future.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quickstart_runs_and_says_what_it_is_stored_with(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    # Without a user's own kernels, "python3" is the Python that runs this test.
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    stored = outputs_of(notebook)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    assert any(stored) and outputs_of(notebook) == stored


def outputs_of(notebook):
    """What each cell shows, but for numbers, whose last digits differ between machines.

    So does the number of spaces with which NumPy aligns them.
    """
    texts = []
    for cell in notebook.cells:
        # Joined: what a cell prints comes in pieces, and a slow machine makes more of them.
        text = ""
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                assert "Warning" not in output["text"]
                continue  # XLA's log
            text += output.get("text") or output["data"]["text/plain"]
        texts.append(re.sub(r" +", " ", re.sub(r"\d+\.\d+", "#", text)))
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_a_title_and_was_run_once_from_top_to_bottom(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first = notebook.cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    counts = [cell.execution_count for cell in code_of(notebook)]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_checks_what_it_states(path):
    notebook = nbformat.read(path, as_version=4)
    lines = [line for cell in code_of(notebook) for line in cell.source.splitlines()]
    assert any(line.startswith("assert ") for line in lines)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_notebook_are_text_and_plots_without_errors_and_paths(path):
    notebook = nbformat.read(path, as_version=4)
    for cell in code_of(notebook):
        assert "print(" not in cell.source or cell.outputs, cell.source
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    pictures = 0
    for output in outputs:
        assert output.output_type in ("stream", "execute_result", "display_data")
        assert output.get("name") != "stderr", output
        data = output.get("data", {})
        pictures += "image/png" in data
        text = "".join(output.get("text", "")) + str(data.get("text/plain", ""))
        assert "Warning" not in text and "Traceback" not in text
        assert not A_PATH_OF_A_MACHINE.search(text), text
    assert pictures >= 1
    assert path.stat().st_size < 400_000


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
