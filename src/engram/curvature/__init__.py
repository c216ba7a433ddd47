"""One pass over the data -> the factors of the curvature of the sum of losses."""
