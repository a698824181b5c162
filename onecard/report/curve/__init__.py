"""What a curve shows: losses, noise, the learning rate's phase, speed, and early alarms."""
