"""Tests of dsjax.cache."""
