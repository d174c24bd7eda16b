"""Configurations of models and servers, as functions that return them."""
