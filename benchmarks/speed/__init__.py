"""What influences and leave-one-out cost, by engram and by other libraries: one command."""
