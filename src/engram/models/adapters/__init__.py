"""Fitted models of other libraries as fits of engram; none of them is imported for it."""
