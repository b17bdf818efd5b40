"""`nkw compile`: the graphs of an engine on NeuronCores, compiled before the first request."""
