"""Checkpoints of other projects, in and out, without executing anything they contain."""
