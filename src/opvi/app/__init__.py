"""The command `opvi`: learn from a table, predict, report."""
