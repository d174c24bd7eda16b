"""Tests of dsjax's scheduler."""
