"""Equal names for equal values, in any process: tensors, functions, objects."""
