"""Everything that is saved: whole on disk or not at all, and whole when it is read, or refused."""
