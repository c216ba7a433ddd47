"""What a call will take before it is made, from a few small ones that are."""
