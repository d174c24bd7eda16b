"""Tests; folders mirror the sources. Answers are stated as exact values."""
