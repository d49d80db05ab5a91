"""Classes that first appear in the middle of a stream: the schema learns their names."""

import numpy as np

from opvi.adapters._tables import Block, Encoded, Schema

MOST_CLASSES = 256  # of which some came later; rows with more labels than that are rejected


def met(schema: Schema, block: Block) -> tuple[Schema, Encoded]:
    """Return the schema extended by the block's new classes, in order of its rows, and the rows encoded with it."""
    fresh = [] if schema.closed else schema.unknown(block)
    if not fresh:
        return schema, schema.encode(block)
    known = len(schema.classes)
    wide = schema._replace(classes=[*schema.classes, *fresh])
    codes, first = np.unique(np.asarray(wide.encode(block).y), return_index=True)  # of the rows that are sound
    late = codes[np.argsort(first)]
    named = [wide.classes[code] for code in late[late >= known]][: max(0, MOST_CLASSES - known)]
    schema = schema._replace(classes=[*schema.classes, *named])
    return schema, schema.encode(block)
