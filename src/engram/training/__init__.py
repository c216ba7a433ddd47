"""What a training has done: how far it went in its own metric, and where it passed by.

``record``: one line before the loop; ``training``: the record itself; ``metrics``: what every kind
of optimizer divides a gradient by, one short function each; ``clock``: the sums of that over the
steps; ``clipping``: gradients that were scaled down before a step; ``checkpoints``: weights on the
way; ``segments``: stretches of equal training time between them; ``visits``: what the steps said
about the examples that they used; ``intervals``: sums of that; ``named_batches``: which they were;
``order``: what it takes to walk the training again, and ``replay``, which does.
"""
