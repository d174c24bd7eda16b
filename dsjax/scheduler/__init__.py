"""Chooses what each step works on; knows no arrays."""
