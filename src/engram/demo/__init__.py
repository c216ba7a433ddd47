"""The demonstration: a net on scikit-learn's digits, some labels wrong, and what engram finds."""
