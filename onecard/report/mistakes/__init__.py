"""Settings that were meant otherwise, or that do no good."""
