"""Data as it comes, checked and cut into batches that know which examples they hold."""
