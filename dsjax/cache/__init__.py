"""The paged cache: what it holds (spec), who holds it (pool, prefix, manager), and the device arrays (state)."""
