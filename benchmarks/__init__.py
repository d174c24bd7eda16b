"""Load generators and measurements; not installed with the package."""
