"""The tracker as a callback of other libraries' training loops: Lightning and transformers."""
