"""Where a loss stands among published ones."""
