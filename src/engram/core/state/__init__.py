"""What a call must leave as it was: the model, its modes and buffers, the thread, the process."""
