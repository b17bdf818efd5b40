"""Training of the models in model/pretrained; `__main__.py` is the command."""
