"""The parts of latent attention."""
