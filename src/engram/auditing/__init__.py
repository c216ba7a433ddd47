"""Data in, findings out: what ``engram.audit`` and the command line do, as functions."""
