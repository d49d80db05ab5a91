"""Which strings the inputs of a hashed column stand for: the most frequent ones of each input."""

from opvi.adapters._tables import Schema, hashed_place

KEPT = 8  # strings counted in each place
SHOWN = 3
LONGEST = 40  # characters
NEARLY = 0.95  # of the rows of a place: strings that make up that many need no others beside them

Words = dict[str, dict[str, dict[str, int]]]  # by column, by place, such as `7+`: rows of each text


def counted(words: Words, met: dict[str, list[str]]) -> None:
    """Count the strings of some rows, in order, in bounded memory.

    Once an input has as many strings as are counted, a new one takes over the count of the rarest (Space-Saving;
    Metwally et al. 2005): every string with more than an eighth of an input's rows is there, and the counts add up to
    the number of rows.
    """
    for column, texts in met.items():
        places = words.setdefault(column, {})
        for text in texts:
            place, sign = hashed_place(text)
            here, text = places.setdefault(f"{place + 1}{'+' if sign > 0 else '−'}", {}), text[:LONGEST]
            rows = here.get(text, 0)
            if not rows and len(here) >= KEPT:
                rarest = min(here, key=here.__getitem__)
                rows = here.pop(rarest)
            here[text] = rows + 1


def copied(words: Words) -> Words:
    """Return the counts as they are now."""
    return {column: {place: dict(here) for place, here in places.items()} for column, places in words.items()}


def named(words: Words) -> dict[str, dict[str, str]]:
    """Return the name of each input of each hashed column: its most frequent strings."""
    return {column: {place: _told(here) for place, here in places.items()} for column, places in words.items()}


def _told(here: dict[str, int]) -> str:
    told: list[str] = []
    total, sofar = sum(here.values()), 0
    for text in sorted(here, key=lambda text: (-here[text], text)):
        if len(told) == SHOWN or sofar >= NEARLY * total:
            return f"{', '.join(told)}, …"
        told.append(text)
        sofar += here[text]
    return ", ".join(told)


def shown(schema: Schema, words: Words) -> list[str]:
    """Return the names of the inputs; those of hashed columns with the strings they stand for."""
    called, out = named(words), list(schema.features)
    for index, (name, origin) in enumerate(zip(schema.features, schema.origin, strict=True)):
        place = name.removeprefix(f"{origin}: hash ")
        if origin in called and place != name:
            plus, minus = (called[origin].get(place + sign) for sign in "+−")
            parts = [plus or "", f"less {minus}" if minus else ""]
            out[index] = f"{origin}: {', '.join(part for part in parts if part)}" if plus or minus else name
    return out
