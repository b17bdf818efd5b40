"""`nkw imagine`: draws images with a diffusion model."""
