"""The tracker inside of other libraries: callbacks, loggers, and a dataset that gives indices."""
