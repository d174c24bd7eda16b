"""Names of token sequences by their content.  [no jax]"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence


class UnitHashes:
    """Chained digests of the units of one token sequence. The digest of a unit names all tokens up to its end."""

    def __init__(self, salt: str, unit_tokens: int):
        self.unit_tokens = unit_tokens
        root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32)
        self.digests = [root.digest()]  # [i] names i units

    def extend(self, tokens: Sequence[int], num_units: int) -> None:
        """Makes `digests[0..num_units]` available; `tokens` are all tokens of the sequence."""
        size, pack, digest = self.unit_tokens, _ids_of(self.unit_tokens).pack, self.digests[-1]
        for begin in range((len(self.digests) - 1) * size, num_units * size, size):
            # A cryptographic hash: a collision would serve another prompt's text.
            digest = hashlib.blake2b(digest + pack(*tokens[begin : begin + size]), digest_size=32).digest()
            self.digests.append(digest)


@functools.cache
def _ids_of(num: int) -> struct.Struct:
    """So many ids as bytes; of a list, numpy takes twice as long."""
    return struct.Struct(f"<{num}i")
