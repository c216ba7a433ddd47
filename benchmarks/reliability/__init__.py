"""Ctrl-C and kills at random times: what is left of the model, the process and the folders."""
