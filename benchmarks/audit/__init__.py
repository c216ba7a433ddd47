"""Audits of data with wrong labels put in, beside cleanlab with five-fold probabilities."""
