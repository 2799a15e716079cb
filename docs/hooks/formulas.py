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
        latex = html.unescape(found["latex"])
        if found["tag"] == "div":
            return f'<div class="formula">{convert(latex, display="block")}</div>'
        return convert(latex)

    # latex2mathml takes a prime for a letter, which browsers then raise too far.
    return FORMULA.sub(draw, content).replace("<mi>\u2032</mi>", "<mo>\u2032</mo>")
