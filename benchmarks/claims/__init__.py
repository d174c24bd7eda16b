"""What practice claims of scheduling and caching, each measured on ours: `python -m benchmarks.claims`."""
