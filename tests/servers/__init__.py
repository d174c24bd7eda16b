"""Tests of the server over a real loopback channel, with a fake engine."""
