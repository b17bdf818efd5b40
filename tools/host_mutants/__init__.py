"""Mutation testing of the host code: faults in the checker, the engine and the server that tests notice or miss."""
