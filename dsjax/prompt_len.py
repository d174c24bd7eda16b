"""How long a prompt may be, asked of its tokens, or of its text before that is encoded.  [no jax]"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsjax.errors import invalid


def check_prompt_len(num_tokens: int, max_model_len: int, at_least: str = "") -> None:
    """Raises RequestError(INVALID_ARGUMENT) unless a prompt of so many tokens leaves room for one of output."""
    if num_tokens >= max_model_len:
        raise invalid(
            f"the prompt has {at_least}{num_tokens} tokens, and with one token of output exceeds "
            f"max_model_len={max_model_len}"
        )


def check_texts(tokenizer: Any, texts: Iterable[str], max_model_len: int) -> None:
    """Raises as `check_prompt_len` if a prompt of these texts must be too long; to encode one takes 1000 times as long.

    The prompt holds each of the texts, and perhaps more. What passes may still be too long.
    """
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    check_prompt_len(tokenizer.fewest_tokens(num_bytes), max_model_len, "at least ")
