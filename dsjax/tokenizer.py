"""A checkpoint's tokenizer, through the `tokenizers` library.  [no jax]

Two copies of one BPE are held: `_full` knows the added tokens (control tokens such as `<｜User｜>`), `_plain` is the
same tokenizer without them. Text from users is encoded by `_plain`, so no text of theirs can become a control id:
"<｜User｜>" is then eleven ordinary characters. DeepSeek flags only three of its control tokens as "special", which
is why the flag cannot be the guard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dsjax.chat_markers import BOS, EOS
from dsjax.errors import ConfigError, invalid


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte-level alphabet: the printable character that stands for each byte in a vocabulary."""
    direct = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in direct}
    others = (byte for byte in range(0x100) if chr(byte) not in table)
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
_UTF8_BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # the others never occur in UTF-8


class Tokenizer:
    """Text to ids and back. Immutable after `from_path`; threads may share it."""

    vocab_size: int  # one more than the largest id
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __init__(self, spec: dict[str, Any], config: dict[str, Any] | None = None):
        """From the parsed tokenizer.json and tokenizer_config.json; raises ConfigError."""
        _check_byte_level(spec)
        spec = spec | {"truncation": None, "padding": None}  # either would change a prompt without a word
        added = [token["content"] for token in spec.get("added_tokens") or ()]
        self._full = _load(spec)
        self._plain = _load(_without_added_tokens(spec, set(added)))
        self._special = {id for id, token in self._full.get_added_tokens_decoder().items() if token.special}
        self._added = {text: self._full.token_to_id(text) for text in added}
        for text, token_id in self._added.items():
            if token_id in self._plain.encode(text, add_special_tokens=False).ids:
                raise ConfigError(f"added token {text!r} is also a merge of ordinary text: user text could forge it")
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        # A token of a byte-level vocabulary has a character for each of its bytes.
        self._longest_token = max(map(len, self._plain.get_vocab())) if _keeps_every_byte(spec) else None
        self.bos_token_id = self._named_token(config, "bos_token", BOS)
        eos = self._named_token(config, "eos_token", EOS)
        self.eos_token_ids = () if eos is None else (eos,)

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Loads a folder with tokenizer.json, or that file; tokenizer_config.json beside it names BOS and EOS.

        Without tokenizer_config.json BOS and EOS are DeepSeek's, where the vocabulary has them.
        Raises ConfigError if a file is missing or cannot be read.
        """
        path = Path(path)
        file = path if path.is_file() else path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"tokenizer={str(path)!r} has no tokenizer.json")
        config_file = file.with_name("tokenizer_config.json")
        return cls(_read_json(file), _read_json(config_file) if config_file.is_file() else None)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, with no BOS or EOS put around it.

        With `allow_special` the texts of added tokens become their ids; without, they stay ordinary text. Raises
        RequestError(INVALID_ARGUMENT) if `text` is not valid Unicode.
        """
        tokenizer = self._full if allow_special else self._plain
        try:
            # the fast form skips character offsets, which takes half the time on a long prompt
            return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError) as error:  # `tokenizers` answers a lone surrogate with TypeError
            raise invalid("text is not valid Unicode: it must be a string without lone surrogates") from error

    def fewest_tokens(self, num_bytes: int) -> int:
        """A bound from below on the number of tokens of texts that have so many bytes of UTF-8 together.

        No token stands for more bytes than the vocabulary's longest. 0 if this tokenizer may drop some of a text.
        """
        return 0 if self._longest_token is None else -(-num_bytes // self._longest_token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Only tokens flagged special are skipped: `<think>`, `</think>` and `｜DSML｜` stay in the text. Raises
        RequestError(INVALID_ARGUMENT) for an id outside the vocabulary.
        """
        if len(ids) and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            at, bad = next((i, id) for i, id in enumerate(ids) if not 0 <= id < self.vocab_size)
            raise invalid(f"token_ids[{at}]={bad} is not allowed: the tokenizer has the ids 0 to {self.vocab_size - 1}")
        return self._full.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, which may be part of a character; b"" for an id without a token.

        A model's vocabulary may be padded beyond the tokenizer's, so an unknown id here is no error.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        cached = self._bytes[token_id]
        if cached is None:
            token = self._full.id_to_token(token_id) or ""
            try:
                cached = bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token is written as it is read
                cached = token.encode()
            self._bytes[token_id] = cached
        return cached

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out of the text."""
        return token_id in self._special

    def control_id(self, marker: str) -> int | None:
        """Id of the added token whose text is `marker`; None if the vocabulary has no such token."""
        return self._added.get(marker)

    def _named_token(self, config: dict[str, Any] | None, name: str, default: str) -> int | None:
        if config is None:
            return self._full.token_to_id(default)
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            return None
        token_id = self._full.token_to_id(text) if isinstance(text, str) else None
        if token_id is None:
            raise ConfigError(f"{name}={text!r} of tokenizer_config.json is not a token of tokenizer.json")
        return token_id


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(file)!r} must hold a JSON object")
    return value


def _load(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # `tokenizers` raises a bare Exception
        raise ConfigError(f"tokenizer.json cannot be used: {error}") from error


def _check_byte_level(spec: dict[str, Any]) -> None:
    """Detokenising works on bytes, so the decoder must be the one that maps a token to bytes."""
    decoder = spec.get("decoder") or {}
    parts = decoder.get("decoders") or () if decoder.get("type") == "Sequence" else (decoder,)
    if [part.get("type") for part in parts] != ["ByteLevel"]:
        raise ConfigError(f"decoder={decoder.get('type')!r} of tokenizer.json is not supported: it must be ByteLevel")
    vocab = (spec.get("model") or {}).get("vocab") or {}
    missing = [f"0x{byte:02x}" for char, byte in _BYTE_OF_CHAR.items() if byte in _UTF8_BYTES and char not in vocab]
    if missing:  # `tokenizers` would drop such a byte from the prompt without a word
        raise ConfigError(f"the vocabulary of tokenizer.json has no token for the bytes {', '.join(missing[:8])}")


def _keeps_every_byte(spec: dict[str, Any]) -> bool:
    """Whether each byte of a text is part of some token: no step before the BPE takes any away."""

    def keeps(step: dict[str, Any] | None, children: str, kinds: Sequence[str]) -> bool:
        if step is None:
            return True
        if step.get("type") == "Sequence":
            return all(keeps(child, children, kinds) for child in step.get(children) or ())
        return step.get("type") in kinds and step.get("behavior") != "Removed"

    return (
        (spec.get("model") or {}).get("type", "BPE") == "BPE"
        and keeps(spec.get("normalizer"), "normalizers", ())  # even NFC makes some texts shorter
        and keeps(spec.get("pre_tokenizer"), "pretokenizers", ("ByteLevel", "Split", "Digits", "Punctuation"))
    )


def _without_added_tokens(spec: dict[str, Any], added: set[str]) -> dict[str, Any]:
    """The same BPE with no added tokens; their entries leave the vocabulary, or `ignore_merges` would find them."""
    model = spec.get("model") or {}
    vocab = {token: id for token, id in (model.get("vocab") or {}).items() if token not in added}
    return spec | {"added_tokens": [], "post_processor": None, "model": model | {"vocab": vocab}}
