"""Print a version's part of the changelog: `python docs/release_notes.py 0.1.0`."""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def notes(text: str, version: str) -> str:
    """Return what stands under a version's heading, up to the next one; raise an error if there is nothing."""
    heading = re.search(rf"^## \[{re.escape(version)}\].*$", text, re.MULTILINE)
    if heading is None:
        known = ", ".join(re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE))
        raise ValueError(f"CHANGELOG.md has no version {version}. It has {known}.")
    rest = text[heading.end() :]
    following = re.search(r"^(## |\[[^\]]+\]: )", rest, re.MULTILINE)
    part = rest[: following.start() if following else None].strip()
    if not part:
        raise ValueError(f"CHANGELOG.md says nothing about version {version}.")
    return part + "\n"


if __name__ == "__main__":
    try:
        print(notes(CHANGELOG.read_text(encoding="utf-8"), sys.argv[1]), end="")
    except (IndexError, ValueError) as error:
        sys.exit(str(error) if isinstance(error, ValueError) else __doc__)
