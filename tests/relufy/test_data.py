"""Documents, held-out splits, packing and the order of training samples."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import resource
import signal

import numpy as np
import pytest

from powerinfer_toolkit.convert.relufy.settings import RelufySettings
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.training import blocks, documents
from powerinfer_toolkit.training.blocks import Split, TextEncoder, TokenStore
from powerinfer_toolkit.training.sources import DataSource

SEPARATOR = 256
DOCUMENTS = [f"document {i} " + "x" * (7 * i % 23) for i in range(120)]


def chat_template(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


ENCODER = TextEncoder(
    lambda texts: [list(text.encode()) for text in texts], chat_template, SEPARATOR, "bytes"
)


def read(**source: object) -> list[str]:
    return list(documents.read_documents(DataSource(**source), chat_template))


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def settings(tmp_path, **changes: object) -> RelufySettings:
    values = {"output_dir": str(tmp_path / "out"), "max_length": 16, "held_out_share": 0.2}
    return RelufySettings(**values | changes)


def test_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\n---\ntwo\n---\n")
    (tmp_path / "b.md").write_text("three")
    assert read(path=str(tmp_path / "*")) == ["one\n---\ntwo\n---\n", "three"]
    assert read(path=str(tmp_path / "a*"), document_separator="\n---\n") == ["one", "two"]


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_lines(tmp_path, suffix, opener):
    with opener(tmp_path / f"a.jsonl{suffix}", "wt") as stream:
        stream.write('{"text": "one"}\n\n{"body": 1, "text": "two"}\n')
    assert read(path=str(tmp_path / "*")) == ["one", "two"]


def test_chats_go_through_the_template(tmp_path):
    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yes"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(line))
    assert read(path=str(tmp_path / "chat.jsonl")) == ["<user>hi<bot>yes"]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": DOCUMENTS, "n": list(range(120))}), path)
    assert read(path=str(path), text_column="body") == DOCUMENTS


def test_the_hubs_records_are_read_as_local_ones(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args: object, **options: object) -> object:
        asked.append((args, options))
        return datasets.Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(id="someone/texts", config="en", split="test") == ["one", "two"]
    assert asked == [(("someone/texts", "en"), {"split": "test", "streaming": True})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", b'{"body": "x"}\n', "no text in text"),
        ("a.jsonl", b'{"messages": "x"}\n', "chat template fails"),
        ("a.jsonl", b"\xff\xfe\n", "not UTF-8"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt.xz", b"none", "a.txt.xz is damaged"),
        ("a.txt.gz", b"none", "a.txt.gz is damaged"),
        ("a.jsonl.bz2", b"none", "a.jsonl.bz2 is damaged"),
        ("a.txt.gz", gzip.compress(b"text" * 9)[:-9], "a.txt.gz is damaged"),
        ("a.txt.gz", gzip.compress(b"text")[:10] + b"\xff" * 20, "a.txt.gz is damaged"),
        ("a.parquet", b"none", "not parquet"),
    ],
)
def test_faulty_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PiError, match=message):
        read(path=str(tmp_path / name))


def test_a_name_with_the_signs_of_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("one")
    (tmp_path / "a1.txt").write_text("two")
    assert read(path=str(tmp_path / "a[1].txt")) == ["one"]
    assert read(path=str(tmp_path / "a[!2].txt")) == ["two"]


def test_a_template_that_refuses_a_chat(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "</s>": 1}, [])),
        eos_token="</s>",
        chat_template="{{ raise_exception('roles must alternate') }}",
    )
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    source = DataSource(path=str(tmp_path / "a.jsonl"))
    template = blocks.text_encoder(tokenizer, None).chat_template
    with pytest.raises(PiError, match="line 1: the chat template fails: roles must alternate"):
        list(documents.read_documents(source, template))


def test_no_file():
    with pytest.raises(PiError, match=r"no file matches /nowhere/\*"):
        read(path="/nowhere/*")


def test_the_split_is_the_texts_own():
    share = {split: 0 for split in Split}
    for i in range(4000):
        share[blocks.split_of(f"text {i}", 0.2)] += 1
    # binomial: 4000 * 0.2 +- 4 * sqrt(4000 * 0.2 * 0.8) = 800 +- 101; halves of it 400 +- 76
    assert abs(share[Split.TEST] - 400) < 76
    assert abs(share[Split.CALIBRATION] - 400) < 76
    assert all(blocks.split_of(f"text {i}", 0) is Split.TRAIN for i in range(100))


def test_stored_blocks_are_the_documents_end_to_end(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    source = DataSource(path=path)
    store = TokenStore(settings(tmp_path, dataset_mixture=[source]), ENCODER, tmp_path)
    store.make()
    seen = set()
    for split in Split:
        tokens = store.blocks(source, split).flatten()
        texts = bytes(t if t != SEPARATOR else 0 for t in tokens).decode().split("\0")
        assert set(texts[:-1]) <= {d for d in DOCUMENTS if blocks.split_of(d, 0.2) is split}
        seen |= set(texts[:-1])
    assert len(seen) > 0.9 * len(DOCUMENTS)  # the last tokens of a split fill no block


def test_tokens_are_made_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    source = DataSource(path=path)
    chosen = settings(tmp_path, dataset_mixture=[source])
    TokenStore(chosen, ENCODER, tmp_path / "tokens").make()

    def fail(texts: list[str]) -> list[list[int]]:
        raise AssertionError("tokenised again")

    again = TokenStore(
        chosen, TextEncoder(fail, chat_template, SEPARATOR, "bytes"), tmp_path / "tokens"
    )
    again.make()
    write_lines(tmp_path / "a.jsonl", DOCUMENTS[1:])
    with pytest.raises(AssertionError, match="tokenised again"):
        again.make()


def test_a_full_disk_leaves_no_tokens(tmp_path):
    changes = {"dataset_mixture": [DataSource(write_lines(tmp_path / "a.jsonl", DOCUMENTS * 9))]}
    store = TokenStore(settings(tmp_path, **changes), ENCODER, tmp_path / "tokens")
    limits, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.make()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_at_most_so_many_documents_are_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", DOCUMENTS)
    assert read(path=path, max_documents=7) == DOCUMENTS[:7]


def test_held_out_sources_are_held_out_whole(tmp_path):
    train = DataSource(path=write_lines(tmp_path / "a.jsonl", DOCUMENTS[:100]))
    test = DataSource(path=write_lines(tmp_path / "b.jsonl", DOCUMENTS[100:]))
    chosen = settings(tmp_path, dataset_mixture=[train], eval_mixture=[test])
    store = TokenStore(chosen, ENCODER, tmp_path / "tokens")
    store.make()
    assert not len(store.blocks(train, Split.TEST)) + len(store.blocks(test, Split.TRAIN))
    assert len(blocks.held_out_blocks(store, Split.TEST, 64))


def test_nothing_held_out_is_an_error(tmp_path):
    source = DataSource(path=write_lines(tmp_path / "a.jsonl", DOCUMENTS))
    chosen = settings(tmp_path, dataset_mixture=[source], held_out_share=1e-9)
    store = TokenStore(chosen, ENCODER, tmp_path / "tokens")
    store.make()
    with pytest.raises(PiError, match="held out for test"):
        blocks.held_out_blocks(store, Split.TEST, 64)


def test_without_weights_every_block_comes_once_an_epoch():
    order = blocks.mixture_order([5, 3], None, 20, seed=1)
    every = {(0, b) for b in range(5)} | {(1, b) for b in range(3)}
    epochs = [list(map(tuple, order[i : i + 8])) for i in (0, 8)]
    assert all(set(epoch) == every for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert np.array_equal(order, blocks.mixture_order([5, 3], None, 20, seed=1))
    assert not np.array_equal(order, blocks.mixture_order([5, 3], None, 20, seed=2))
    assert np.array_equal(order[:12], blocks.mixture_order([5, 3], None, 12, seed=1))


def test_weights_decide_how_often_a_source_is_seen():
    order = blocks.mixture_order([50, 7], [3.0, 1.0], 4000, seed=0)
    first, second = (order[order[:, 0] == source, 1] for source in (0, 1))
    assert abs(len(first) - 3000) < 4 * (4000 * 0.75 * 0.25) ** 0.5
    for blocks_seen, n in ((first, 50), (second, 7)):
        counts = np.bincount(blocks_seen, minlength=n)
        assert counts.max() - counts.min() <= 1
    assert sorted(second[:7]) == list(range(7))


def streamed(tmp_path, **changes: object):
    mixture = pytest.importorskip("powerinfer_toolkit.convert.relufy.mixture")
    sources = [
        DataSource(path=write_lines(tmp_path / f"{name}.jsonl", texts), weight=weight)
        for name, texts, weight in (("a", DOCUMENTS[:80], 3.0), ("b", DOCUMENTS[80:], 1.0))
    ]
    chosen = settings(tmp_path, dataset_mixture=sources, max_steps=5, streaming=True, **changes)
    return mixture, chosen


def test_a_stream_replays_itself(tmp_path):
    pytest.importorskip("torch")
    mixture, chosen = streamed(tmp_path, shuffle_buffer=10)
    first, second = (
        [s["input_ids"].tolist() for s in itertools.islice(stream, 300)]
        for stream in (mixture.StreamedMixture(chosen, ENCODER) for _ in range(2))
    )
    assert first == second
    assert len(set(map(tuple, first))) > 150  # 200-odd blocks, read round and round
    held_out = mixture.streamed_held_out(chosen, ENCODER, Split.TEST)
    texts = {d for d in DOCUMENTS if blocks.split_of(d, 0.2) is not Split.TRAIN}
    trained = bytes(t if t != SEPARATOR else 0 for block in first for t in block)
    assert not [text for text in texts if b"\0" + text.encode() + b"\0" in trained]
    assert bytes(held_out[0].tolist()[:11]).startswith(b"document")
