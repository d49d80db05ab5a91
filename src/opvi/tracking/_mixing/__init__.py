"""How experts are weighed: one online stacker, and the heads that make distributions of its predictions."""
