"""How an entry of the cache lies in memory.  [no jax]

A page has one array of values and, where they are quantised, one of side words:

latents (keys that are values too; the last `rope` of `width` channels are rotary and stay bfloat16 in any format)
  float32, bfloat16   values [entries, width]; on a CPU bfloat16's bits, uint16: XLA scatters into bfloat16 there by
                      widening the whole pool and rounding it back
  int8, fp8           values uint8 [entries, width]: a code for each other channel (two's complement, E4M3), then the
                      high bytes of the rotary channels' bfloat16; side uint32 [entries, words]: the rotary channels'
                      low bytes (word j: channels j, j + rope/4, j + rope/2, j + 3 rope/4, from the low byte up), then
                      the scales: for int8 one float32, for fp8 one E8M0 byte a group of 64 channels (group g is byte
                      g % 4 of word g // 4), as in the released checkpoints' caches. 592 bytes for 512 channels of which
                      64 are rotary; the release has 584, without the padding to 16 bytes.
index keys (no rotary channels of their own: the release quantises all)
  float32, bfloat16   values [entries, width], the same way
  int8, fp8           values uint8 [entries, width], side uint32 [1, entries]: the entry's scale, a float32
  fp4                 values uint8 [entries, width / 2], E2M1 codes: channel c in the low four bits of byte c, channel
                      c + width / 2 in the high ones; side uint32 [1, entries]: byte g is the E8M0 scale of channels
                      32 g .. 32 g + 31. Kept in the Hadamard basis, as in the release: it spreads a large channel's
                      rounding error over all.

A TPU copies memory in rows of 128 lanes of 32 bits, so that there pages are tiled. Float entries that are gathered one
by one have values [entries, width / 128, 128]. Latents' bytes are uint32 words [entries, width / 4]: word j is bytes j,
j + width/4, j + width/2, j + 3 width/4, from the low one up, so that each plane of bytes is a run of channels. Their
side words are [rows, 1, 128] (without the axis of 1, memory would be padded to 8 rows), rows = ceil(entries / (128 //
words)), entry e in row e % rows from lane words * (e // rows) on. fp4 values are [entries / 2, 128], entry e in row
e % (entries / 2) from lane 64 * (e // (entries / 2)) on. An index key's side word is in lane e of [1, lanes], lanes a
multiple of 128: XLA would lay out anything narrower anew for every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128
FP8_GROUP = 64  # channels that share a scale in a latent
FP4_GROUP = 32
PLAIN = ("float32", "bfloat16")
LATENT_FORMATS = (*PLAIN, "int8", "fp8")
KEY_FORMATS = (*LATENT_FORMATS, "fp4")

Shape = tuple[tuple[int, ...], str]  # of an array: its sizes and its dtype's name


@dataclass(frozen=True)
class EntryFormat:
    """Raises ValueError for a format that cannot hold entries of that width."""

    name: str
    width: int
    rope: int = 0  # the last channels, that stay bfloat16; 0 for index keys
    as_bits: bool = False  # of bfloat16: kept as uint16

    def __post_init__(self):
        if self.name not in (LATENT_FORMATS if self.rope else KEY_FORMATS):
            formats = LATENT_FORMATS if self.rope else KEY_FORMATS
            raise ValueError(f"a cache entry's format {self.name!r} must be one of {', '.join(formats)}")
        if self.as_bits and self.name != "bfloat16":
            raise ValueError(f"as_bits is for bfloat16, not for format {self.name}")
        if self.quantised and self.rope % 4:
            raise ValueError(f"format {self.name} keeps rotary channels in fours, which rope={self.rope} is not")
        if self.name == "fp4" and (self.width & (self.width - 1) or not FP4_GROUP <= self.width <= 4 * FP4_GROUP):
            raise ValueError(f"format fp4 takes keys of 32, 64 or 128 channels, not {self.width}")

    @property
    def quantised(self) -> bool:
        return self.name not in PLAIN

    @property
    def num_codes(self) -> int:
        """Channels that are quantised."""
        return self.width - self.rope if self.quantised else 0

    @property
    def num_groups(self) -> int:
        """Scales of an entry."""
        if self.name == "fp8" and self.rope:
            return -(-self.num_codes // FP8_GROUP)
        return self.width // FP4_GROUP if self.name == "fp4" else 1

    @property
    def side_words(self) -> int:
        """Of an entry."""
        if not self.rope:
            return 1
        words = self.rope // 4 + (-(-self.num_groups // 4) if self.name == "fp8" else 1)
        return -(-words // 4) * 4  # whole units of 16 bytes, which a GPU's bulk copies ask for

    def can_tile(self) -> bool:
        """Whether its width is one that TPU kernels are written for: rows of whole lanes."""
        return self.width % (4 * LANES if self.quantised and self.rope else LANES) == 0

    def side_rows(self, entries: int) -> int:
        """Of a tiled page."""
        return -(-entries // (LANES // self.side_words))

    def page_shapes(self, entries: int, tiled: bool = False, gathered: bool = False) -> tuple[Shape, ...]:
        """The arrays of a page of `entries` entries, values and, if quantised, side words."""
        rows = (entries,)
        if not self.quantised:
            width = (self.width // LANES, LANES) if tiled and gathered else (self.width,)
            return (((*rows, *width), "uint16" if self.as_bits else self.name),)
        if self.name == "fp4":
            values = (entries // 2, LANES) if tiled else (entries, self.width // 2)
        else:
            values = (*rows, self.width)
        if not self.rope:
            side = (1, -(-entries // LANES) * LANES if tiled else entries)
            return (values, "uint8"), (side, "uint32")
        if tiled:
            return ((*rows, self.width // 4), "uint32"), ((self.side_rows(entries), 1, LANES), "uint32")
        return (values, "uint8"), ((entries, self.side_words), "uint32")
