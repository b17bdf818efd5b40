"""What the command lines of simulator and model share: terminal, files, processes, errors, targets, verbs."""
