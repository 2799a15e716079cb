"""Runs the test suites of libraries written for Equinox with this one. For use by hand.

    python scripts/ecosystem_tests.py [NAME...]
    python scripts/ecosystem_tests.py NAME=CHECKOUT

Of each library, the newest release and its tests are installed in a temporary
environment. Its tests run with Equinox, and then with `equinox_like`. A row of the table
of docs/ecosystem.md is printed, and below it each test that only passes with Equinox. A
suite that takes longer than MINUTES (15) is interrupted; tests that ran are counted.

The releases of some libraries have no tests. Name a checkout of the repository then, as in
`jaxtyping=../jaxtyping`.
"""

import collections
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALIAS = ROOT / "equinox_like" / "_alias"
MINUTES = float(os.environ.get("MINUTES", "15"))
# Packages that the tests need and that the library does not install, and arguments of
# pytest.
_SYBIL = ["sybil", "optional_dependencies", "hypothesis", "pytest-arraydiff"]
SUITES: Mapping[str, tuple[list[str], list[str]]] = {
    "coordinax": ([*_SYBIL, "pytest-mpl", "pytest-env"], []),
    "diffraxtra": (["sybil", "optional_dependencies"], []),
    "dynestyx": (["typeguard<3", "arviz"], []),
    "enzax": (
        ["requests", "python-libsbml"],
        # This one replaces a part of a private file of Equinox.
        ["--ignore=tests/test_shard_map_patch.py"],
    ),
    "flowjax": (["beartype", "numpyro"], []),
    "flowmc": ([], []),
    "gpjax": (
        ["hypothesis", "mktestdocs", "networkx", "xarray", "pytest-beartype"],
        [],
    ),
    "jaxmore": ([*_SYBIL, "beartype", "optax", "pytest-benchmark"], []),
    "jaxoplanet": ([], []),
    "jaxtyping": (["beartype", "cloudpickle", "ipython", "typeguard<3"], []),
    "jinns": ([], []),
    "klax": ([], []),
    "oncequinox": (_SYBIL, []),
    "paramax": (["beartype"], []),
    "parax": (["optax"], []),
    "quax": ([], []),
    "quaxed": (["sybil", "optional_dependencies"], []),
    "tinygp": (["flax", "jaxopt"], []),
    "traceax": ([], []),
}


def try_suite(name: str, checkout: str, folder: Path) -> None:
    more, arguments = SUITES.get(name, ([], []))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip"]
    tests, version = Path(checkout).resolve(), "checkout"
    if not checkout:
        source = ["--no-deps", "--no-binary", name, "--dest", folder, name]
        subprocess.run([*pip, "download", "-q", *source], check=True)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        tests = folder / archive.name.removesuffix(".tar.gz")
        version = tests.name.rpartition("-")[2]
    suite = next((x for x in ("tests", "test") if (tests / x).is_dir()), None)
    if suite is None:
        print(f"{name}: the release has no tests, so name a checkout.")
        return
    tools = ["pytest", "pytest-timeout", "equinox==0.13.8"]
    subprocess.run([*pip, "install", "-q", tests, ROOT, *tools, *more], check=True)

    def run(path: Path | str) -> dict[str, bool]:
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "--timeout=300",
            f"--junitxml={report}",
        ]
        command += ["-p", "no:cacheprovider", *arguments, suite]
        environment = {**os.environ, "PYTHONPATH": str(path)}
        with subprocess.Popen(command, cwd=tests, env=environment) as process:
            try:
                process.wait(60 * MINUTES)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
        return dict(results(report))

    genuine, ours = run(""), run(ALIAS)
    both = genuine.keys() & ours.keys()
    passed = [sum(each[test] for test in both) for each in (genuine, ours)]
    print(f"| {name} | {version} | {passed[0]} | {passed[1]} |")
    for test in sorted(both):
        if genuine[test] and not ours[test]:
            print(f"    only with Equinox: {test}")


def results(report: Path) -> Iterator[tuple[str, bool]]:
    """The name of each test, and whether it did not fail. Skipped tests are left out.

    Addresses of objects, which differ between runs, are removed from the names. Tests
    that then have the same name are numbered.
    """
    seen = collections.Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("name") and case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            name = f"{case.get('classname')}::{case.get('name')}"
            name = re.sub("0x[0-9a-f]+", "0x", name)
            seen[name] += 1
            yield f"{name} ({seen[name]})", not failed


if __name__ == "__main__":
    for argument in sys.argv[1:] or SUITES:
        name, _, checkout = argument.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            try_suite(name, checkout, Path(folder))
