"""Formulas as MathML, which browsers draw themselves: no script, no font to fetch."""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)


def on_page_content(content: str, **kwargs: object) -> str:
    def draw(found: re.Match[str]) -> str:
        display = "block" if found["tag"] == "div" else "inline"
        return convert(html.unescape(found["latex"]), display=display)

    return FORMULA.sub(draw, content)
