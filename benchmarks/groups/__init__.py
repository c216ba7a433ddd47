"""Leaving groups, sources and classes out of nets as people train them, beside training again."""
