"""Datasets, tensors and loaders, checked and cut into batches that know their examples' indices."""
