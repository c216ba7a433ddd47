"""The tracker in other libraries: callbacks of Lightning and transformers, TensorBoard."""
