"""What to do next, by what it should bring."""
