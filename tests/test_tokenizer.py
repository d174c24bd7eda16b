"""The tokenizer: the release's cases, and user text that cannot become a control id."""

import json

import pytest
from tokenizers import Tokenizer as HfTokenizer

from dsjax.chat_markers import BOS, EOS, MARKERS, THINK_END, USER
from dsjax.errors import ConfigError, ErrorCode, RequestError
from dsjax.tokenizer import Tokenizer, _keeps_every_byte
from tests.chat_cases import chat_file, released_tokenizer, tiny_spec_json, tiny_tokenizer

INJECTIONS = [
    "<｜User｜>",
    "</think>",
    "a<think>b",
    "<｜end▁of▁sentence｜>",
    "x｜DSML｜y",
    "<｜▁pad▁｜>",
    "<｜image｜>",
]


def tiny_spec() -> dict:
    return json.loads(tiny_spec_json())


def test_released_tokenizer_is_the_one_of_the_release():
    tokenizer = released_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (129280, 0, (1,))
    assert tokenizer.control_id(USER) == 128803
    assert tokenizer.control_id("hello") is None


def test_released_tokenizer_passes_the_handed_cases():
    tokenizer = released_tokenizer()
    for case in chat_file("chat.json")["tokenizer"]:
        assert tokenizer.encode(case["text"], allow_special=True) == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded_keep_special"]
        if not any(marker in case["text"] for marker in MARKERS):
            assert tokenizer.encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("make", [released_tokenizer, tiny_tokenizer])
def test_special_text_in_user_text_stays_text(make):
    tokenizer = make()
    control = {tokenizer.control_id(text) for text in tokenizer._added}
    for text in [*INJECTIONS, *MARKERS, "".join(MARKERS)]:
        ids = tokenizer.encode(text)
        assert not control & set(ids), text
        assert tokenizer.decode(ids) == text


def test_no_added_token_of_the_release_can_be_forged():
    tokenizer = released_tokenizer()
    assert len(tokenizer._added) == 1283
    for text, token_id in tokenizer._added.items():
        assert tokenizer.encode(text, allow_special=True) == [token_id]
        assert token_id not in tokenizer.encode(text)


def test_ignore_merges_does_not_bring_a_control_id_back():
    spec = tiny_spec()
    vocab = spec["model"]["vocab"]
    spec["model"]["ignore_merges"] = True  # a whole word is then looked up before it is split
    for token in spec["added_tokens"]:
        vocab[token["content"]] = token["id"]
    tokenizer = Tokenizer(spec)
    think = tokenizer.control_id("<think>")
    assert tokenizer.encode("<think>", allow_special=True) == [think]
    assert think not in tokenizer.encode("<think>")
    assert tokenizer.decode(tokenizer.encode("<think>")) == "<think>"


def test_an_added_token_that_merges_make_is_refused():
    spec = tiny_spec()
    left, right = spec["model"]["merges"][0]
    spec["added_tokens"].append({**spec["added_tokens"][-1], "content": left + right})
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used|could forge it"):
        Tokenizer(spec)


def test_encode_equals_the_library_without_special_text():
    spec = tiny_spec()
    library = HfTokenizer.from_str(json.dumps(spec))
    for text in ["", " ", "the sea\n\n", "Zwölf 中文 🙂", "\x00\x7f", "𝒜ℝ", "x" * 1000]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert tiny_tokenizer().encode(text) == expected
        assert tiny_tokenizer().encode(text, allow_special=True) == expected
        assert tiny_tokenizer().decode(expected) == text


def test_encode_refuses_a_lone_surrogate():
    with pytest.raises(RequestError, match="text is not valid Unicode") as caught:
        tiny_tokenizer().encode("a\ud800")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_decode_skips_only_tokens_flagged_special():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(f"{BOS}{USER}hi{THINK_END}{EOS}", allow_special=True)
    assert tokenizer.decode(ids) == f"{USER}hi{THINK_END}"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{BOS}{USER}hi{THINK_END}{EOS}"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, 374, 2**40])
def test_decode_refuses_an_id_outside_the_vocabulary(bad):
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size == 374
    with pytest.raises(RequestError, match=rf"token_ids\[2\]={bad} is not allowed: the tokenizer has the ids 0 to 373"):
        tokenizer.decode([1, 2, bad, 3])


def test_token_bytes_join_to_the_text():
    tokenizer = tiny_tokenizer()
    text = f"Zwölf 中文 🙂 {THINK_END}{USER}\x00"
    ids = tokenizer.encode(text, allow_special=True)
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == text.encode()
    assert tokenizer.token_bytes(374) == tokenizer.token_bytes(-1) == b""  # a padded vocabulary of the model


def test_a_long_text_of_any_kind_is_encoded():
    tokenizer = released_tokenizer()
    for text in [" " * 300_000, "a" * 300_000, "\t\x01" * 150_000, "!" * 300_000, "中" * 100_000]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("make", [released_tokenizer, tiny_tokenizer])
def test_no_text_has_fewer_tokens_than_the_bound(make):
    tokenizer = make()
    longest = max(tokenizer._plain.get_vocab(), key=len)
    texts = ["", " " * 9999, "a" * 999, "中" * 99, "🙂", "\r\n" * 500, "1234567" * 9, USER, "the sea " * 99]
    for text in [*texts, tokenizer.decode([tokenizer._plain.token_to_id(longest)] * 7)]:
        assert tokenizer.fewest_tokens(len(text.encode())) <= len(tokenizer.encode(text))
    assert [tokenizer.fewest_tokens(n * len(longest) + 1) for n in (0, 1, 2)] == [1, 2, 3]


@pytest.mark.parametrize(
    "step, sound",
    [
        ({"normalizer": None}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": []}}, True),
        ({"normalizer": {"type": "NFC"}}, False),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Strip"}]}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}}, False),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated"}}, True),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}]}}, False),
        ({"model": {"type": "WordLevel"}}, False),
    ],
)
def test_there_is_no_bound_where_part_of_a_text_may_be_dropped(step, sound):
    assert _keeps_every_byte({"model": {"type": "BPE"}, **step}) is sound


def test_from_path_reads_a_folder_or_a_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tiny_spec_json(), encoding="utf-8")
    tokenizer = Tokenizer.from_path(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (360, (361,))  # DeepSeek's, without a config
    config = {"bos_token": None, "eos_token": {"content": "</think>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_path(tmp_path / "tokenizer.json")
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_ids == (tokenizer.control_id("</think>"),)


def test_bad_folders_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json' cannot be read as JSON"):
        Tokenizer.from_path(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        Tokenizer.from_path(tmp_path)
    file.write_text(json.dumps(tiny_spec() | {"decoder": {"type": "WordPiece"}}))
    with pytest.raises(ConfigError, match=r"decoder='WordPiece' of tokenizer\.json is not supported"):
        Tokenizer.from_path(tmp_path)
    file.write_text(json.dumps(tiny_spec() | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    with pytest.raises(ConfigError, match="has no token for the bytes 0x21, "):
        Tokenizer.from_path(tmp_path)
    file.write_text(tiny_spec_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ConfigError, match=r"eos_token='</s>' of tokenizer_config\.json is not a token"):
        Tokenizer.from_path(tmp_path)


def test_truncation_in_the_file_does_not_cut_a_prompt():
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(tiny_spec() | {"truncation": truncation})
    assert tokenizer.encode("the river runs") == tiny_tokenizer().encode("the river runs")
