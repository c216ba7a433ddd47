r"""The tangent pass: how far every example's outputs move, :math:`J_i S^{-1} J_i' e_i`, without J.

The walk of the data, from a model and its data to a deviation:

1. ``session``: opens model and data for passes, batch by batch; everything outside starts here.
2. ``prepare``: before the first batch, plans the passes and checks the plan; gives the ``Engine``.
3. ``probe``: two runs on a few examples see every operation that a parameter enters (through
   ``interception``), and which dimension of its tensors counts examples.
4. ``plan``: the outcome: for each use of a parameter a rule, copies, or a whole module (``units``).
5. ``self_check``, ``refusals``: the plan's gradients must be autograd's; what cannot be is named.
6. ``recorder``: runs a batch by the plan and notes its ``sites``, where parameters meet the data.
7. ``rules/``: at a site, from the gradient at its output to per-example gradients, and from a step
   of the weights to the move of that output. **To add a layer, add a file there.**
8. ``passes``: a ``Trace`` is one recorded forward pass: backward to every site, the step of S^-1
   there (``steps``, and ``products`` for V), and forward again through the backward pass.
9. ``gradient_accumulator``: the sum of all gradients, which a pass comes by anyway.
10. ``streaming/``: the same on a step of the user's own training, whose passes are there already.
"""
