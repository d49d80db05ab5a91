"""Text that is not UTF-8: the encodings of older Western European spreadsheets are recognised and decoded."""

import codecs
from collections.abc import Iterator
from itertools import chain

LATIN, WIDE = "cp1252", "utf-16"  # Windows' Latin-1; what spreadsheets call Unicode text
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how such a file begins
LONGEST = 1 << 17  # bytes in which a first line is looked for
LINES = 3  # that must look like it, if the first does not
# Bytes that such a file holds: letters with accents, signs of currency, quotes, dashes, fractions, a hard space.
PLAUSIBLE = frozenset(range(0xA0, 0xFF)) | frozenset("€‚„…ŠŒŽ‘’“”•–—šœžŸ".encode(LATIN))


class AsUtf8:
    """The bytes of a source in UTF-8. `encoding` names the original encoding if it was another one."""

    def __init__(self, pieces: Iterator[bytes]):
        first = b""
        for piece in pieces:
            first += piece
            if b"\n" in first or len(first) > LONGEST:
                break
        self.encoding = WIDE if first.startswith(WIDE_MARKS) else LATIN if is_latin(first) else ""
        self._pieces = chain([first] if first else [], pieces)

    def __iter__(self) -> Iterator[bytes]:
        if not self.encoding:
            return self._pieces
        if self.encoding == WIDE:
            return _from_wide(self._pieces)
        return (_decoded(piece) for piece in self._pieces)  # one byte, one letter: a piece may end anywhere


def _from_wide(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Convert UTF-16 to UTF-8; characters may be split between pieces, and invalid ones become \ufffd."""
    decoder = codecs.getincrementaldecoder(WIDE)("replace")
    for piece in chain(pieces, [b""]):
        if text := decoder.decode(piece, final=not piece):
            yield text.encode("utf-8", "replace")


def is_latin(text: bytes) -> bool:
    """Return whether a source is in Windows' Latin-1: its first line, or three lines, are not valid UTF-8.

    A stray byte in a UTF-8 file does not count: its row is rejected.
    """
    if text.isascii():
        return False
    lines = text.split(b"\n")
    looked = lines[:-1] or lines  # the last may be cut off
    strange = [(place, line) for place, line in enumerate(looked) if not line.isascii()]
    if not strange or any(_is_utf8(line) for _, line in strange):
        return False
    if not all(byte < 0x80 or byte in PLAUSIBLE for _, line in strange for byte in line):
        return False
    return strange[0][0] == 0 or len(strange) >= LINES


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoded(piece: bytes) -> bytes:
    return codecs.charmap_decode(piece, "replace", TABLE)[0].encode()


TABLE = "".join(bytes([byte]).decode(LATIN, "replace") for byte in range(256))
