"""An error that a call has to end with, and the words it has to say."""

import re

from engram.errors import EngramError


class Refusal:
    """Collects an error and checks its words."""

    def __init__(self, kind, *words, states_both_sides=True):
        self.kind, self.words, self.both = kind, words, states_both_sides

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, f"expected {self.kind}, nothing was raised"
        if not isinstance(error, self.kind):
            return False
        assert isinstance(error, EngramError)
        message = str(error).lower()
        required = [*self.words, *(["expected", "got"] if self.both else [])]
        missing = [word for word in required if not re.search(word, message)]
        assert not missing, f"the message lacks {missing}: {error}"
        return True
