"""Datasets by name: what there is, and how it comes here."""
