"""How the shipped models are trained: see `__main__.py`."""
