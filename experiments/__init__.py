"""The figures of the paper, one command each: ``python -m experiments list``.

One file a figure in ``figures/``, over frozen settings that are the paper's own; what differs at a
smaller scale is in the scale. Models, data, training, plotting and keeping are one piece of code
each, and everything is asked of engram through its public names.
"""
