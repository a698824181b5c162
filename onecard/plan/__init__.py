"""What a run will need before it starts: memory, time, money. No torch."""
