"""MkDocs hook: a picture that stands alone gets its description as a caption, so that readers see what to look for."""

import re
from typing import Any

ALONE = re.compile(r'<p>(<img alt="([^"]+)" src="[^"]+" ?/?>)</p>')


def on_page_content(content: str, **_: Any) -> str:
    """Replace every paragraph that holds one picture and nothing else."""
    return ALONE.sub(r"<figure>\1<figcaption>\2</figcaption></figure>", content)
