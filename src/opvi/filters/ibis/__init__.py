"""The posterior of all rows: iterated batch importance sampling over stored rows."""
