"""Posteriors trained by natural gradients, Gaussian and Bernoulli."""
