"""Batch files, validation, job life and results."""
