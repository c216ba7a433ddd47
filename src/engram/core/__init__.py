"""What everything stands on: the equation, errors, parameters, data, state, storage, progress."""
