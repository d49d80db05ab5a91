"""opvi from the tools people already use, one adapter per module."""
