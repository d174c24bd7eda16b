"""Tests of dsjax's engine."""
