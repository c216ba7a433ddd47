"""Processes that work on one thing, as the ranks of ``torch.distributed`` do.

``group``: what they add up and put together; ``presence``: who is there, and who has stopped;
``meeting``: the one way in, which sees that all have the same model and data; ``shares``: parts of
the work for processes that share a folder and nothing else.
"""
