"""Tests of dsjax's runner."""
