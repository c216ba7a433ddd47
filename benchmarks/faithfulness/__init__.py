"""How close estimates come to training again: engram's and those of other libraries."""
