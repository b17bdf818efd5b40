"""Training of the image model model/pretrained/shapes; `__main__.py` is the command."""
