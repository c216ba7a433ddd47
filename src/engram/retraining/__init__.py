"""The truth: models trained again without some examples, and estimates held against them."""
