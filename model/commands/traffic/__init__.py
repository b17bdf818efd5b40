"""`nkw traffic`: predicts what users of a model see."""
