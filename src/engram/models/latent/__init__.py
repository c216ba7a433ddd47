"""Latent Gaussian models: outputs linear in a Gaussian vector, with and without each example."""
