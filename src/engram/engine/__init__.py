"""The tangent pass: how outputs move when every example has its own change of the parameters."""
