"""Package dsjax of the protocol."""
