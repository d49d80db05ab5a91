"""Run the Python blocks of pages, one after the other, and write under each what it printed and drew.

`python docs/execute.py docs/guides/*.md` brings the pages up to date; a page stays plain Markdown.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `paper`, which is not installed

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"\n<!-- output -->\n.*?<!-- end -->\n", re.DOTALL)


def execute(page: Path, draw: bool = True) -> str:
    """The page with its outputs renewed. Figures left open by a block are saved beside the page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from paper import plots

    text, names, out, last, drawn = OUTPUT.sub("", page.read_text(encoding="utf-8")), {}, [], 0, 0
    for block in BLOCK.finditer(text):
        printed = io.StringIO()
        with plots.style(), contextlib.redirect_stdout(printed):
            exec(compile(block.group(1), str(page), "exec"), names)
        said = printed.getvalue().rstrip()
        shown = [said + "\n" if said.startswith("|") else f"```text\n{said}\n```\n"] if said else []  # | is a table
        for number in plt.get_fignums():
            drawn += 1
            figure = plt.figure(number)
            picture = page.with_name(f"{page.stem}-{drawn}.png")
            if draw:
                plots.save(figure, picture)
            plt.close(figure)
            shown.append(f"![{figure.get_label() or 'What the block above draws'}]({picture.name})\n")
        out.append(text[last : block.end()])
        if shown:
            out.append("\n<!-- output -->\n" + "\n".join(shown) + "\n<!-- end -->\n")
        last = block.end()
    return "".join([*out, text[last:]])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name} …", file=sys.stderr)
        path = Path(name)
        path.write_text(execute(path), encoding="utf-8")
