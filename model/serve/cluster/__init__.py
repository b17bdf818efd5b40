"""Engines on the machines of a Ray cluster, which Ray Serve places, restarts and checks; this server has the port."""
