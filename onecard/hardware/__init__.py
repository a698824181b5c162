"""What a card can do, and what this machine has."""
