"""Cutting books into chapters, and the split."""

from __future__ import annotations

import gzip
import struct
import zlib

import pytest

from training import rdata
from training.corpus import Document, bible_chapters, clean, novel_chapters, split

NOVEL = """The Project Gutenberg EBook of A Tale
VOLUME I

CHAPTER I

THE START

It was a
_dark_ night.

\u201cWho\u2019s there?\u201d she cried\u2014twice.

CHAPTER II. A Title

Nothing more.

FINIS

End of Project Gutenberg's A Tale
CHAPTER III

licence
"""


def test_novel_chapters_hold_text_alone():
    assert novel_chapters(NOVEL) == [
        'It was a dark night.\n\n"Who\'s there?" she cried--twice.',
        "Nothing more.",
    ]


def test_bible_chapters_drop_notes_titles_and_marks():
    osis = (
        '<title>The Book</title><chapter n="1" osisID="G.1" sID="G.1"/><div sID="a" type="x-p"/>In the beginning, '
        '<w lemma="x">God</w><note placement="foot">or, <reference>1:1</reference>another</note>created '
        'light<note>x</note>.<div eID="a" type="x-p"/><div sID="b" type="x-p"/>Tom &amp; Bel.<chapter eID="G.1"/>'
        '<title>Next</title><chapter n="2" osisID="G.2" sID="G.2"/>The end.<chapter eID="G.2"/>'
    )
    assert bible_chapters(osis) == ["In the beginning, God created light.\n\nTom & Bel.", "The end."]


def test_clean_keeps_paragraphs_and_joins_lines():
    assert clean("a\nb  c\n\n\n \nd") == "a b c\n\nd"


def test_split_holds_out_every_twentieth_chapter_of_each_book():
    documents = [Document(book=book, index=i, text=f"{book}{i}") for book in "AB" for i in range(45)]
    training, held_out = split(documents)
    assert [d.text for d in held_out] == ["A10", "A30", "B10", "B30"]
    assert len(training) == 86 and not {d.text for d in training} & {d.text for d in held_out}
    assert split(documents) == (training, held_out)


def r_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">ii", 9, len(data)) + data


def r_strings(*texts: str) -> bytes:
    return struct.pack(">ii", 16, len(texts)) + b"".join(map(r_string, texts))


HEADER = b"X\n" + struct.pack(">iii", 2, 0, 0)


def test_reads_the_strings_of_a_lazy_load_database():
    records = [HEADER + r_strings("one", ""), HEADER + r_strings("två")]
    data = b"".join(struct.pack(">I", len(r)) + zlib.compress(r) for r in records)
    assert rdata.read_lazy_load_database(data) == [["one", ""], ["två"]]


def test_reads_a_saved_data_frame():
    columns = struct.pack(">ii", 19 | 512, 2) + struct.pack(">iii", 13, 1, 7) + r_strings("text")
    attributes = struct.pack(">ii", 2 | 1024, 1) + r_string("names") + r_strings("id", "line") + struct.pack(">i", 254)
    pairs = struct.pack(">ii", 2 | 1024, 1) + r_string("frame") + columns + attributes + struct.pack(">i", 254)
    frame = rdata.read_saved(gzip.compress(b"RDX2\n" + HEADER + pairs))["frame"]
    assert frame.value == [[7], ["text"]] and frame.attributes == {"names": ["id", "line"]}


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="type 3"):
        rdata.read_saved(gzip.compress(b"RDX2\n" + HEADER + struct.pack(">ii", 3, 0)))
    with pytest.raises(ValueError, match="not an R data file"):
        rdata.read_saved(gzip.compress(b"other"))
