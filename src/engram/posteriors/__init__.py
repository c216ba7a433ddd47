"""Gaussian posteriors: blocks of a precision, and how they are fitted or read off."""
