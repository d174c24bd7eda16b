"""Tests of several processes that run one engine."""
