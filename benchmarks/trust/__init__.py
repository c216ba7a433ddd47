"""The study behind the verdict: signals that need no truth, beside the truth from retraining."""
