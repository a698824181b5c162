"""What a run, or a pasted log, has to tell."""
