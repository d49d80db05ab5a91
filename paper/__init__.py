"""Experiments that a command runs from start to finish."""
