"""No way to donate ends the process while other threads read, save, print and log.

For one and a half seconds, or as long as `STRESS_SECONDS` says; `.ci/run` says 30.
"""

import os
from pathlib import Path

from processes import finish, start

SCRIPT = Path(__file__).parent.parent / "reading_threads.py"


def test_donated_arrays_can_be_read_by_other_threads():
    seconds = float(os.environ.get("STRESS_SECONDS", "1.5"))
    process = start(SCRIPT, seconds, devices=4)
    out = finish(process, timeout=300 + 2 * seconds)
    assert len(out.splitlines()) == 15
