"""Helpers of latent attention."""
