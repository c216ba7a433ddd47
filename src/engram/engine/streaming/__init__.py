"""The tangent pass on a step of the user's, whose forward and backward pass are there already.

``step`` records one call of the model and its backward pass; ``tape`` takes down the operations of
that call and carries the perturbations of the sites forward along them.
"""
