"""A linear predictor: its design, the precision of its coefficients, and how they are fitted."""
