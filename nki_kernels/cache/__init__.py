"""Where keys and values lie in HBM: contiguous caches, rows that are named at run time, and pages."""
