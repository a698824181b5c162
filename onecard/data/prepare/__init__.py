"""`onecard prepare`: text to tokens. Begin with command.py."""
