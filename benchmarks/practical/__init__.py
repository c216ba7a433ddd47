"""Nets as people train them: mini-batches, BatchNorm, dropout, schedules, a fixed number of epochs.

``python -m benchmarks.practical truth NAME`` finds the truth about a setting by many trainings on
random subsets, ``folds`` what a five-fold cross-validation says, ``epochs`` the losses of every
example after each epoch of a few full trainings. All of it is kept in a folder for other benchmarks
to compare with.
"""
