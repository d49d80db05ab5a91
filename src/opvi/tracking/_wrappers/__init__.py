"""Wrappers around a stack, each of which does one thing for every model: units, first rows, outliers, changes."""
