"""From posterior and engine to the sensitivity of examples, groups and pairs."""
