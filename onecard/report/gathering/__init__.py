"""Facts of a run, gathered from its log, its reader, its config, its folder and its data."""
