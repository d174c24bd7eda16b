"""Streamed text equals decode of all ids; stop strings match the same at every split."""

import random
from itertools import product

import pytest

from dsjax.chat_markers import EOS
from dsjax.detokenizer import Detokenizer
from dsjax.request import SamplingParams
from tests.chat_cases import released_tokenizer, tiny_tokenizer

SAMPLES = [
    "hello world ",
    "中文分词",
    "🙂👍🏽",
    "naïve é́",
    "𝒜ℝ∑",
    "\n\n",
    "</think>",
    "def f():\n",
    "<｜User｜>",
    "ひら",
]


class Letters:
    """A tokenizer whose ids are indices of given byte strings: the split of a text is then the test's to choose."""

    def __init__(self, *tokens: bytes | str):
        self.tokens = [token.encode() if isinstance(token, str) else token for token in tokens]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def run(tokens, **params):
    """(visible text after each add, text of finish, the stop that matched, ids given) of `tokens`."""
    detokenizer = Detokenizer(Letters(*tokens), SamplingParams(**params))  # type: ignore[arg-type]
    texts = []
    for token_id in range(len(tokens)):
        texts.append(detokenizer.add(token_id))
        if detokenizer.stop:
            break
    return texts, detokenizer.finish(), detokenizer.stop, len(texts)


def splits(text):
    """Every way to cut `text` into tokens."""
    for cuts in product([False, True], repeat=len(text) - 1):
        tokens = [""]
        for char, cut in zip(text, [False, *cuts], strict=True):
            if cut:
                tokens.append("")
            tokens[-1] += char
        yield tokens


@pytest.mark.parametrize("make", [released_tokenizer, tiny_tokenizer])
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_text_equals_decode_of_all_ids(make, skip):
    tokenizer = make()
    rng = random.Random(skip)
    for number in range(400):
        if number % 2:  # any ids: bytes that are no UTF-8
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        else:  # a text, cut off at any byte, with single bytes thrown in
            ids = tokenizer.encode("".join(rng.choices(SAMPLES, k=6)), allow_special=True)[: rng.randrange(1, 40)]
            for _ in range(rng.randrange(3)):
                ids.insert(rng.randrange(len(ids) + 1), rng.randrange(256))
        stops = ("\x01never",) if number % 3 else ()  # with and without the automaton
        detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip, stop=stops))
        text = "".join(map(detokenizer.add, ids))
        assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)
        assert detokenizer.stop is None


def test_random_bytes_decode_as_the_library_does():
    tokenizer = tiny_tokenizer()
    of_byte = {
        tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(id)) == 1
    }
    rng = random.Random(0)
    lead = [0x61, 0x80, 0xBF, 0xC2, 0xC0, 0xE0, 0xE4, 0xED, 0xA0, 0xF0, 0x90, 0xF4, 0x8F, 0xF5, 0xFF, 0x9F]
    for _ in range(2000):
        ids = [of_byte[bytes([rng.choice(lead)])] for _ in range(rng.randrange(1, 9))]
        detokenizer = Detokenizer(tokenizer, SamplingParams())
        text = "".join(map(detokenizer.add, ids))
        assert text + detokenizer.finish() == tokenizer.decode(ids)


def test_a_split_character_is_held_until_it_is_whole():
    assert run([b"\xf0\x9f", b"\x99", b"\x82!"]) == (["", "", "🙂!"], "", None, 3)


def test_bytes_that_can_no_longer_become_a_character_are_shown_at_once():
    assert run([b"\xf0\x9f", b"a"]) == (["", "\ufffda"], "", None, 2)


def test_an_incomplete_character_shows_at_the_end_only():
    assert run([b"a\xe4\xb8"]) == (["a"], "\ufffd", None, 1)


def test_an_id_the_tokenizer_lacks_has_no_text():
    detokenizer = Detokenizer(tiny_tokenizer(), SamplingParams())
    assert (detokenizer.add(5000), detokenizer.finish()) == ("", "")


def test_eos_alone_is_empty_text():
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    assert detokenizer.add(tokenizer.control_id(EOS)) == ""  # type: ignore[arg-type]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_is_found_at_every_split(include):
    for tokens in splits("one STOP two"):
        texts, rest, stop, taken = run(tokens, stop="STOP", include_stop_str_in_output=include)
        kept = next(n for n in range(len(tokens) + 1) if len("".join(tokens[:n])) >= len("one STOP"))
        assert taken == kept
        assert stop == "STOP"
        assert "".join(texts) + rest == ("one STOP" if include else "one ")
        for text in texts:
            assert include or "S" not in text  # no part of a stop is ever shown


def test_a_stop_can_be_the_first_token():
    assert run(["STOP", "x"], stop="STOP") == ([""], "", "STOP", 1)


def test_text_that_was_held_is_flushed_when_nothing_matches():
    assert run(["a", "\n", "\n", "b"], stop="\n\n\n") == (["a", "", "", "\n\nb"], "", None, 4)
    assert run(["a\n", "\n"], stop="\n\n\n") == (["a", ""], "\n\n", None, 2)


@pytest.mark.parametrize("stops", [("ab", "abc"), ("abc", "ab")])
def test_of_a_stop_and_its_prefix_the_one_complete_first_matches(stops):
    for tokens in splits("xabcd"):
        texts, rest, stop, _ = run(tokens, stop=stops)
        assert ("".join(texts) + rest, stop) == ("x", "ab")


@pytest.mark.parametrize("stops", [("b", "ab"), ("ab", "b")])
def test_of_stops_complete_together_the_one_that_starts_first_matches(stops):
    for tokens in splits("xabc"):
        texts, rest, stop, _ = run(tokens, stop=stops)
        assert ("".join(texts) + rest, stop) == ("x", "ab")


def test_the_split_never_changes_which_stop_matches():
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choices("ab", k=7))
        stops = tuple({"".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(3)})
        ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
        end, _, stop = min(ends, default=(len(text), 0, None))
        expected = (text[: end - len(stop)] if stop else text, stop)
        for tokens in splits(text):
            texts, rest, found, _ = run(tokens, stop=stops)
            assert ("".join(texts) + rest, found) == expected


def test_a_stop_may_contain_a_split_character():
    texts, rest, stop, taken = run([b"a\xf0\x9f", b"\x99\x82", b"b"], stop="🙂")
    assert ("".join(texts) + rest, stop, taken) == ("a", "🙂", 2)


def test_min_tokens_lets_earlier_stops_pass():
    tokens = ["a", "\n", "b", "\n", "c"]
    assert run(tokens, stop="\n", min_tokens=3)[1:] == ("", "\n", 4)
    assert run(tokens, stop="\n", min_tokens=4)[3] == 4  # complete with token 4, so there are 4
    assert run(tokens, stop="\n", min_tokens=5) == (["a", "\n", "b", "\n", "c"], "", None, 5)


def test_min_tokens_with_a_stop_that_overlaps_itself():
    assert run(["aa", "a"], stop="aa", min_tokens=2) == (["a", ""], "", "aa", 2)


def test_after_a_match_nothing_is_added():
    detokenizer = Detokenizer(Letters("a", "x", "b"), SamplingParams(stop="x"))  # type: ignore[arg-type]
    assert [detokenizer.add(token_id) for token_id in (0, 1, 2)] == ["a", "", ""]
    assert (detokenizer.stop, detokenizer.add(2), detokenizer.finish()) == ("x", "", "")


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_after_the_end_nothing_is_added(stop):
    detokenizer = Detokenizer(Letters("a", b"\xe4", b"\xb8\xad"), SamplingParams(stop=stop))  # type: ignore[arg-type]
    assert [detokenizer.add(0), detokenizer.add(1), detokenizer.finish()] == ["a", "", "\ufffd"]
    assert (detokenizer.add(2), detokenizer.add(0), detokenizer.finish()) == ("", "", "")


def test_text_is_looked_up_again_once_a_split_character_is_whole():
    detokenizer = Detokenizer(Letters("a", b"\xe4", b"\xb8\xad", b"\xad!"), SamplingParams())  # type: ignore[arg-type]
    ids = [0, 1, 2, 0, 1, 0, 3, 0]  # a whole character, one that "a" cuts off, a byte that begins none
    assert [detokenizer.add(id) for id in ids] == ["a", "", "中", "a", "", "\ufffda", "\ufffd!", "a"]
