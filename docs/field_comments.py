"""Griffe extension: the comments beside the fields of a named tuple become a table on the API page."""

import re
from typing import Any

import griffe

COMMENT = re.compile(r"\s#\s(.*)$")


class FieldComments(griffe.Extension):
    """Adds an `Attributes:` section to the docstring of a named tuple whose fields have comments."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Read the comments of a class that griffe has just gone through."""
        if cls.docstring is None or "NamedTuple" not in map(str, cls.bases):
            return
        fields = [member for member in cls.members.values() if member.is_attribute]
        said = {field.name: self._comment(cls, field) for field in fields}
        if any(said.values()):
            lines = (f"    {name}: {comment or '–'}" for name, comment in said.items())
            cls.docstring.value = "\n".join([cls.docstring.value.rstrip(), "", "Attributes:", *lines])

    def _comment(self, cls: griffe.Class, field: Any) -> str:
        """The comment at the end of a field's line, and the lines of comment below."""
        source = cls.lines_collection[cls.filepath]
        found = COMMENT.search(source[field.endlineno - 1])
        words = [found[1]] if found else []
        for line in source[field.endlineno :]:
            if not line.strip().startswith("# "):
                break
            words.append(line.strip().removeprefix("# "))
        return as_markdown(" ".join(words))


def as_markdown(comment: str) -> str:
    """A plain comment, with shapes as code: a line that begins with `[T]:` would define a link."""
    parts = comment.split("`")
    parts[::2] = [re.sub(r"\[[^\]]*\]", r"`\g<0>`", part).replace("*", r"\*") for part in parts[::2]]
    return "`".join(parts)
