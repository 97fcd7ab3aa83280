"""Texts that tell tokenizers apart, and small tokenizers trained on them."""

# ruff: noqa: RUF001 - characters that look alike are the point
from __future__ import annotations

import random

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
