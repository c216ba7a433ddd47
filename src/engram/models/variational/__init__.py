"""Variational posteriors of linear models, for losses without derivatives and for binary weights.

:func:`~engram.models.variational.linear.fit_variational_linear` has Gaussian weights,
:func:`~engram.models.variational.binary.fit_binary_linear` weights of -1 and 1. Both are trained by
natural gradients and can leave examples out at any time.
"""
