"""Engines on the machines of a Ray cluster: Ray Serve places, restarts and checks them; the server stays in front."""
