"""Programs that use published clients unmodified: each runs in the client's own environment, not in that of the tests.

Arguments: the address of the server's routes (`…/v1`), the folder of its model, and an empty folder.
"""
