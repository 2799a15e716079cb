"""Classes that are not importable, in another process."""

import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sent_by_value.py")
RECEIVE = """
import pickle, sys
payload = sys.stdin.buffer.read()
for _ in range(2):
    check, sent = pickle.loads(payload)
    check(**sent)
"""


@pytest.fixture(scope="module")
def payloads():
    return runpy.run_path(str(SCRIPT), run_name="__main__")["payloads"]


@pytest.fixture(params=["cloudpickle", "joblib"])
def payload(request, payloads):
    return payloads[request.param]


def test_another_process_loads_modules_that_it_cannot_import(payload):
    run = subprocess.run(
        [sys.executable, "-c", RECEIVE], input=payload, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


def test_classes_stay_usable_where_their_own_bytes_are_loaded(payload):
    check, sent = pickle.loads(payload)
    check(**sent)
