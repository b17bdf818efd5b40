"""Digests of instruction streams and launch lists, to prove that a change of the source changes neither."""
