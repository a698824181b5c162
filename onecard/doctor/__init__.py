"""What went wrong, which cure has been checked, and whether an advice is true."""
