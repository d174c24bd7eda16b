"""Tests of dsjax/model."""
