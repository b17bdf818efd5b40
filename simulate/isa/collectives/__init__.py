"""The instructions of `nki.collectives`, which the ranks of a replica group carry out together, a file per movement."""
