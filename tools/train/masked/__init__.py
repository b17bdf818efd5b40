"""Training of the masked-diffusion text model model/pretrained/stories-mask; `__main__.py` is the command."""
