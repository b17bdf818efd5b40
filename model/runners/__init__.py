"""Model runners: the steps of a task on a network, contiguous, on pages, and in numpy."""
