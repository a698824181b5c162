"""The training loop; read loop.py first."""
