"""MkDocs hook: formulas become MathML while the site is built, so that pages need no script to show them."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


NAME = re.compile(r"(<mi>(?:log|ln|exp)</mi>)(?=<m(?:i|row|sub|sup|msubsup)\b)")  # before a letter: log p, not logp


def _mathml(found: re.Match[str]) -> str:
    latex = html.unescape(found[3]).strip()
    formula = convert(latex, display="block" if found[2] == "[" else "inline")
    return NAME.sub(r'\1<mspace width="0.17em"/>', formula)


def on_page_content(content: str, **_: Any) -> str:
    """Replace what the arithmatex extension marked."""
    return FORMULA.sub(_mathml, content)
