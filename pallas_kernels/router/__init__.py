"""Which experts a token uses, and with what weights."""

from pallas_kernels.router.api import by_score, by_table

__all__ = ["by_score", "by_table"]
