"""The package does not grow unnoticed: its lines of code have a limit."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
size = runpy.run_path(str(ROOT / "scripts" / "size"))


def test_package_has_at_most_the_lines_that_the_page_on_contributing_allows() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (limit,) = re.findall(r"^\| total \| ([\d,]+) \|$", page, re.MULTILINE)
    total = sum(size["sizes"]().values())
    assert total <= int(limit.replace(",", "")), (
        "If the new code is worth its lines, raise the limit with `scripts/size --write`."
    )


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    source = '"""A\nfile."""\n\nx = [  # a list\n    1,\n\n]\n# the end\n'
    assert size["lines_of_code"](source) == 3
