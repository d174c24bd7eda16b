"""Protocol definitions and the Python generated from them."""
