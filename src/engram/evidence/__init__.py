"""More certainty about a result: assess it, refine some examples, verify it by retraining."""
