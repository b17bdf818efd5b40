"""Programs that write parts of the repository from other parts."""
