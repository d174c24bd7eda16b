"""Version 1 of the protocol; generated, see BUILD.md."""
