"""Mutation testing of host code: single faults in the checker, engine, server and others, for tests to find."""
