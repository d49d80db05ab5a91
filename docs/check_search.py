"""Check that the site's search finds what readers look for: `python docs/check_search.py site`, after `mkdocs build`.

A word is found if a section of a page other than the API has it in its title or text, as the search index stores them.
"""

import argparse
import json
import re
import sys
from pathlib import Path

WORDS = ("drift", "interval", "checkpoint", "Kafka")
NOT_PROSE = ("api/", "source/")


def found(index: dict, word: str) -> list[str]:
    """Return the addresses of the sections that have the word, those with it in their title first."""
    pattern = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    entries = [entry for entry in index["docs"] if not entry["location"].startswith(NOT_PROSE)]
    hits = [entry for entry in entries if pattern.search(f"{entry['title']} {entry['text']}")]
    return [hit["location"] for hit in sorted(hits, key=lambda hit: not pattern.search(hit["title"]))]


def main() -> None:
    """Print where each word is found; fail if one is not."""
    parser = argparse.ArgumentParser(description="Check that the site's search finds what readers look for.")
    parser.add_argument("site", type=Path, help="the folder that MkDocs has built")
    index = json.loads((parser.parse_args().site / "search" / "search_index.json").read_text(encoding="utf-8"))
    hits = {word: found(index, word) for word in WORDS}
    for word, places in hits.items():
        print(f"search for {word!r}: {len(places)} sections, e.g. {', '.join(places[:3]) or 'none'}")
    sys.exit(not all(hits.values()))


if __name__ == "__main__":
    main()
