"""Turns a step's plan into device work."""
