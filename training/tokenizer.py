"""The tokenizer of dsjax-nano: byte-level BPE with the released tokenizer's markers.

Run `python -m training.tokenizer --cache DIR`. Ids 0, 1, 2 are begin, end and pad as in the release; the
markers of the prompt format take the last ids and, as in the release, are added but not special.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from absl import app, flags
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training import corpus, places

VOCAB_SIZE = 2048
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKERS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
# The release's pre-tokenizer: digits in threes, then words with their leading space or punctuation mark.
_DIGITS = r"\p{N}{1,3}"
_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` ids, if the texts hold enough pairs to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_DIGITS), "isolated"),
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # so that any byte can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=True, special=False) for marker in MARKERS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, *, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,  # the renderer of the prompt format writes it
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n")


_MAX_LENGTH = flags.DEFINE_integer("model_max_length", 4096, "tokens the model takes")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    training, held_out = corpus.split(corpus.load(places.cache()))
    tokenizer = train(document.text for document in training)
    save(tokenizer, places.tokenizer(), model_max_length=_MAX_LENGTH.value)
    for name, documents in (("training", training), ("held-out", held_out)):
        size = sum(len(d.text.encode()) for d in documents)
        tokens = sum(len(e.ids) for e in tokenizer.encode_batch([d.text for d in documents]))
        print(f"{name}: {len(documents)} documents, {size} bytes, {tokens} tokens, {size / tokens:.3f} bytes per token")


if __name__ == "__main__":
    app.run(main)
