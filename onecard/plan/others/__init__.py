"""Other people's trainers, planned for as they are. No torch."""
