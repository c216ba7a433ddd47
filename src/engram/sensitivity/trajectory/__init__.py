"""Leave-one-out along a recorded training: the stages at its checkpoints."""
