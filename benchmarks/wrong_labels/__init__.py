"""Wrong labels in the training data of ordinary nets: who finds them, and what it costs.

``python -m benchmarks.wrong_labels`` trains every setting as people do, once recorded by engram and
five times for cleanlab's cross-validated probabilities, and ranks the examples in several ways. The
scores of every example are kept in ``build/wrong_labels``; ``--pages`` writes the page from them.
"""
