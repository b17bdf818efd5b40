"""`nkw compile`: compiles the graphs of an engine for NeuronCores before the first request."""
