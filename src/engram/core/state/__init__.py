"""State that a call must leave unchanged: of the model, the thread and the process.

``model``: the one way in, :func:`~engram.core.state.model.state_preserved`;
``modes_and_buffers``: what of a model is put back; ``process``: the thread and the process (grad
mode, random numbers, flags, attention's kernels).
"""
