"""A run's knobs: what they mean, how they are read, what follows from them. No torch."""
