"""Texts that tell tokenizers apart, and small tokenizers trained on them."""

# ruff: noqa: RUF001 - characters that look alike are the point
from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

ENGLISH = (
    "the of and to in is that for it was on are as with his they be at one have this from or had by hot "
    "word but what some we can out other were all there when up use your how said an each she which do "
    "their time if will way about many then them write would like so these her long make thing see him "
    "two has look more day could go come did number sound no most people my over know water than call "
    "first who may down side been now find tokenizer model neuron sparse activation antidisestablish"
)
WORDS = ENGLISH.split()
UNICODE_PIECES = (
    "naïve café coöperate Zürich Łódź ĀĒĪŌŪ ǅungla ﬁnance ﬀ",
    "Привет мир, как дела? Ёлка №5",
    "Γειά σου Κόσμε ς Σ ὀξύς",
    "مرحبا بالعالم ١٢٣ لَا إِلَٰهَ",
    "שלום עולם בְּרֵאשִׁית",
    "नमस्ते दुनिया क्षत्रिय १२३",
    "สวัสดีชาวโลก ภาษาไทย",
    "你好，世界。漢字仮名交じり文",
    "こんにちは世界 カタカナ ﾊﾝｶｸ",
    "안녕하세요 세계 각",
    "e\u0301 a\u0300\u0316 o\u0308\u0304 n\u0303 \u0301alone",
    "😀😃🙏🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪🇯🇵 ☺️ ✌🏿",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 𐍈 𓀀 🜁",
    "½ ⅓ Ⅳ ① ² ₃ ٪ ‰ ™ ©",
    "“curly” ‘quotes’ — dash – en … « guillemets »",
    "\u00a0nbsp\u2003em\u2009thin\u200bzero\u3000ideographic\u2028line\u0085next",
    "\ufeffbom \u202ertl\u202c \u2060joiner\u00adsoft",
    "\ufffd \ufffe \U000e0041 \uf8ff \U0010ffff",
)
SYNTAX = (
    "I'm you're he's we'll they'd I've can't DON'T I'M 'S 'tis rock'n'roll it''s ' '' '",
    "0 1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-9 2024-01-31 10:45 v2.0.1 ７８９",
    "for (int i = 0; i < n; i++) { a[i] += b[i] * 2; } // loop",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    "https://example.org/a?b=c&d=%20#frag user@example.org C:\\dir\\file.txt",
    '<html><body class="x">&amp; <!-- c --></body></html>',
    "camelCase PascalCase snake_case SCREAMING_CASE kebab-case HTTPServer iPhone XMLHttpRequest",
    "a\r\nb\rc\n\nd\n \n  e\t\tf \t g\v\fh",
    "\x00\x01\x07\x08\x1b[31m\x7f\x80\x9f",
    "!!! ??? ... --- === ### $$$ %%% ^^^ &&& *** ((( ))) [[ ]] {{ }} ~~ `` || \\\\ //",
    "Ġ Ċ ĉ ġ Ą ▁ ▁▁ a▁b <0x0A> <0xFF>",
)
SPECIAL_TEXTS = (
    "<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>",
    "a<|im_end|>b", "<|im_end|><|im_end|>", " <|im_start|> ", "<|im_start", "|im_end|>", "<s>x</s>", "x <s> y",
)  # fmt: skip


def texts(seed: int = 0, n_random: int = 230) -> list[str]:
    """Return more than 300 different texts: fixed ones, runs of spaces and letters, random mixtures."""
    found = ["", " ", "\n", *SPECIAL_TEXTS, *UNICODE_PIECES, *SYNTAX]
    found += [" " * n for n in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64, 100)]
    found += (
        ["a" * n for n in (2, 3, 5, 9, 33)] + ["\n" * n for n in (2, 3, 8)] + ["\t" * 3, " \n " * 4]
    )
    found += [f"{' ' * n}word{' ' * n}" for n in range(1, 9)]
    source = random.Random(seed)
    pieces = [*WORDS, *" ".join((*UNICODE_PIECES, *SYNTAX)).split(" ")]
    for _ in range(n_random):
        chosen = [source.choice(pieces) for _ in range(source.randrange(1, 14))]
        found.append("".join(piece + source.choice(GLUE) for piece in chosen))
    return list(dict.fromkeys(found))


EMOJI_TEXT = "😀 😂 🥲 🫠 ☺️ ❤️ ❤ ✌🏿 🙏🏽 👍🏻 👩‍👩‍👧‍👦 👨🏾‍🚀 🧑🏻‍🤝‍🧑🏿 🏳️‍🌈 🏴‍☠️ 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🇩🇪 🇯🇵 🇺🇳 🇩 1️⃣ #️⃣ ©️ ‼️ 🈁 🀄 👁️‍🗨️ 🤷🏽‍♀️ ⌚ ⏩ 🦀 🫱🏽‍🫲🏿"
EMOJI = EMOJI_TEXT.split(" ")
SCRIPTS = (
    (0x0041, 0x005A), (0x0061, 0x007A), (0x00C0, 0x024F), (0x0370, 0x03FF), (0x0400, 0x052F), (0x0531, 0x058A),
    (0x0590, 0x05FF), (0x0600, 0x06FF), (0x0750, 0x077F), (0x0900, 0x097F), (0x0980, 0x09FF), (0x0B80, 0x0BFF),
    (0x0E00, 0x0E5B), (0x0E80, 0x0EDF), (0x0F00, 0x0FDA), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF),
    (0x1200, 0x137F), (0x13A0, 0x13FD), (0x1780, 0x17F9), (0x1E00, 0x1FFF), (0x3040, 0x30FF), (0x3100, 0x312F),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA48C), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
    (0xFE70, 0xFEFF), (0xFF00, 0xFFEF), (0x10330, 0x1034A), (0x12000, 0x12399), (0x13000, 0x1342F),
    (0x1D400, 0x1D7FF), (0x1E900, 0x1E95F), (0x20000, 0x2A6DF),
)  # fmt: skip
DIGITS = tuple(chr(zero + i) for zero in (0x30, 0x660, 0x6F0, 0x966, 0x9E6, 0xE50, 0x0F20, 0xFF10, 0x1D7CE, 0x11F50)
               for i in range(10)) + tuple("²³¹¼½¾⅓Ⅳⅻ①⑳₃〇一二三百㊿")  # fmt: skip
SPACES = (" ", " ", " ", "\t", "\n", "\r\n", "\r", "\v", "\f", "\x1c", "\x85", "\xa0", "\u1680", "\u2003", "\u2009",
          "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", "\u2060", "\ufeff", "\u180e")  # fmt: skip
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'T", "'RE", "'Ve", "'M", "'LL", "'lL", "'D", "'x",
                "’s", "’RE", "'ſ", "''s", "' s", "'", "n't", "'em", "`s", "'r", "'l", "'v", "'K")  # fmt: skip
CODE = (
    "#include <stdio.h>\nint main(void) {\n\treturn 0;\n}", "SELECT * FROM t WHERE a<=1 AND b!='x';", "a+=b--c&&!d||e^f",
    "$ git commit -m \"fix: x\" && echo $?", "x = [i**2 for i in range(10) if i % 3 == 0]", "fn f<'a>(x: &'a str) -> u8 {",
    "{\"a\": [1, 2.5e-3, null], \"b\": \"\\u00e9\"}", "// TODO(me): ???\r\n\r\n/* c */", "\\begin{align} x^2_{i} \\end{align}",
    "<p class='a'>&nbsp;</p>", "0b1010 0o17 0xDEADbeef 1_000_000L 3.14f", "if(a){b;}else{c;}", "λx.x → ∀y∃z ≤ ≠ ∞ ∑",
)  # fmt: skip
ADDRESSES = (
    "https://www.example.org:8080/a/b%20c?d=e&f=1#g", "ftp://x_y@host/~z", "user.name+tag@example.co.uk", "http://[::1]/",
    "C:\\Users\\x\\y.txt", "/usr/lib/x86_64-linux-gnu/lib.so.6", "www.日本語.jp/ü", "192.168.0.1/24", "doi:10.1000/182",
)  # fmt: skip


@cache
def varied_texts(n: int = 2000, seed: int = 3) -> list[str]:
    """Return `n` different texts: those of texts(), then random ones of every kind and mixtures of them."""
    source = random.Random(seed)
    found = dict.fromkeys([*texts(), "word " * 2000, "é" * 3000, " " * 3000, "0123456789" * 300])
    while len(found) < n:
        kinds = [source.choice(_KINDS) for _ in range(source.choice((1, 1, 2, 3, 5)))]
        found[
            "".join(kind(source) + source.choice(GLUE) * source.randrange(2) for kind in kinds)
        ] = None
    return list(found)


def _run(source: random.Random, pieces: Sequence[str], most: int = 12) -> str:
    return "".join(source.choice(pieces) for _ in range(source.randrange(1, most)))


def _script(source: random.Random) -> str:
    first, last = source.choice(SCRIPTS)
    words = (
        "".join(chr(source.randint(first, last)) for _ in range(source.randrange(1, 9)))
        for _ in range(4)
    )
    return " ".join(words)


def _marks(source: random.Random) -> str:
    marks = [
        *range(0x300, 0x370),
        *range(0x1AB0, 0x1AC0),
        0x5B0,
        0x64E,
        0x651,
        0x93C,
        0xE49,
        0x3099,
        0x20E3,
        0xFE0F,
    ]
    return "".join(
        source.choice("aeoAKcnйיاकกかx1 ") + "".join(chr(source.choice(marks)) for _ in range(source.randrange(4)))
        for _ in range(source.randrange(1, 8))
    )  # fmt: skip


def _any_unicode(source: random.Random) -> str:
    """Any code points but surrogates: assigned, private or neither."""
    tops = (0x80, 0x800, 0xD800, 0xD800, 0x20000, 0x110000)
    points = (source.randrange(source.choice(tops)) for _ in range(source.randrange(1, 16)))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def _words(source: random.Random) -> str:
    styles = (str.lower, str.upper, str.capitalize, str.swapcase)
    return " ".join(
        source.choice(styles)(source.choice(WORDS)) for _ in range(source.randrange(1, 9))
    )


_KINDS = (
    _words,
    _script,
    _script,
    _marks,
    _any_unicode,
    lambda source: _run(source, EMOJI),
    lambda source: _run(source, EMOJI, 4) + source.choice(WORDS),
    lambda source: _run(source, DIGITS),
    lambda source: str(source.randrange(10 ** source.randrange(1, 19))),
    lambda source: f"{source.uniform(-1e6, 1e6):,.3f}",
    lambda source: _run(source, SPACES, 9),
    lambda source: source.choice(SPACES) * source.randrange(1, 40),
    lambda source: " " * source.randrange(1, 70) + source.choice(WORDS),
    lambda source: source.choice(WORDS) + _run(source, CONTRACTIONS, 3),
    lambda source: source.choice(WORDS).upper() + _run(source, CONTRACTIONS, 3),
    lambda source: source.choice(CODE),
    lambda source: source.choice(ADDRESSES),
    lambda source: "".join(chr(source.randrange(32)) for _ in range(source.randrange(1, 9))),
    lambda source: _run(source, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡§«»–—„“”…、。「」！？"),
    lambda source: _run(source, SPECIAL_TEXTS, 4),
    lambda source: _run(source, ["▁", "▁▁", " ", "  ", "a", "<0x41>", "<0xE2>", "Ġ", "Ċ", "##"], 8),
)

GLUE = (" ", " ", " ", "", "  ", "\n", ", ", ". ", "'s ", "7", "\t", "   ")


def training_lines(n: int = 1500) -> list[str]:
    """Return lines to train small tokenizers on: mostly English, with some of everything."""
    source = random.Random(1)
    lines = [*UNICODE_PIECES, *SYNTAX] * 8
    for _ in range(n):
        line = " ".join(source.choice(WORDS) for _ in range(source.randrange(4, 16)))
        lines.append(
            source.choice(
                (line, line.capitalize() + ".", f"    {line}", f"{line} {source.random():.4f}")
            )
        )
    return [line.replace("\x00", "") for line in lines]
