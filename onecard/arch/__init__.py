"""Architectures as facts: shapes, parameters, what the engine is made of. No torch."""
