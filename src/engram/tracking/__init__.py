"""Sensitivities while a model trains: their history, and when to stop."""
