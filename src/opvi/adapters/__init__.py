"""opvi from the tools people already use, one adapter a module."""
