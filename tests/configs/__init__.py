"""Tests of configs."""
