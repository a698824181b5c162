"""The architectures. Parameter names are those of the projects the users come from."""
