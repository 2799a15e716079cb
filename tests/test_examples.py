"""The examples do what they say: the main job at its full size, and the notebooks.

All notebooks are executed by `.ci/run`. Here the quickstart is, which is fast, and the
stored outputs of the others are inspected.
"""

import re
import struct
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
A_PATH_OF_A_MACHINE = re.compile(
    r"/(home|root|tmp|work|opt|usr|var|Users)/|[A-Z]:\\\\?Users|site-packages"
)


def run_digits(out, *options):
    command = [
        sys.executable,
        "-W",
        "error",
        str(EXAMPLES / "train_digits.py"),
        "--out",
        str(out),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
