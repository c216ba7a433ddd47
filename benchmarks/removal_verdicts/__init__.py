"""Verdicts on leaving groups out, beside training again without them."""
