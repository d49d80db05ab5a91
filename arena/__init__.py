"""The online Bayes arena: streams × methods × measures. `python -m arena`."""
