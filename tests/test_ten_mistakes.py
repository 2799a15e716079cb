"""Each mistake on docs/ten-mistakes.md has the message that the page quotes."""

import re
import warnings
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[1] / "docs" / "ten-mistakes.md").read_text()
PROGRAM = re.search(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.M)
MISTAKES = re.findall(
    r"^## (.*?)\n\n```py\n(.*?)^```\n\n```text\n(.*?)\n```$", TEXT, re.DOTALL | re.M
)


def test_there_are_ten():
    assert len(MISTAKES) == TEXT.count("\n## ") == 10


@pytest.mark.parametrize(
    ("code", "message"), [x[1:] for x in MISTAKES], ids=[x[0] for x in MISTAKES]
)
def test_the_message_is_what_is_quoted(code, message, without_type_checks):
    assert PROGRAM is not None
    # With a name that the warnings take for the user's.
    scope = {"__name__": "ten_mistakes"}
    exec(PROGRAM[1], scope)
    with warnings.catch_warnings(), pytest.raises(Exception) as caught:
        warnings.simplefilter("error")
        exec(code, scope)
    said = f"{caught.type.__name__}: {caught.value}"
    pattern = re.escape(message).replace(re.escape("..."), ".*")
    assert re.match(pattern, said, re.DOTALL), f"{said!r} is not {message!r}"
