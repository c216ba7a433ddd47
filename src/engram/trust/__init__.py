"""How far to believe a result, from signals that need no retraining."""
