"""Worker processes: text encoding, chat templates and grammars, computed in forked job processes with limits."""
