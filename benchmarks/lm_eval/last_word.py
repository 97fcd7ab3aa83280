"""Writes a local lm_eval task: the last word of passages of held-out text, as in LAMBADA.

    python benchmarks/lm_eval/last_word.py HELD_OUT.jsonl TASKS
    python -m powerinfer_toolkit.recipes.evaluate --include_path TASKS --tasks last_word --model ...

The first passages of every document in turn, so that long documents do not weigh more.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

N_PASSAGES = 400
CONTEXT_WORDS = 60

TASK = """\
task: last_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: " {{{{word}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


def passages(text: str) -> Iterator[dict[str, str]]:
    """Yield (context, last word) of stretches of words; words that end in a mark of punctuation are left out."""
    words = text.split()
    for begin in range(0, len(words) - CONTEXT_WORDS, CONTEXT_WORDS + 1):
        *context, last = words[begin : begin + CONTEXT_WORDS + 1]
        if last.isalpha():
            yield {"context": " ".join(context), "word": last}


def main() -> None:
    """Read the texts, write the task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("held_out", type=Path)
    parser.add_argument("tasks", type=Path)
    args = parser.parse_args()
    texts = [json.loads(line)["text"] for line in args.held_out.read_text().splitlines()]
    in_turn = itertools.zip_longest(*(passages(text) for text in texts))
    found = (item for row in in_turn for item in row if item is not None)
    args.tasks.mkdir(parents=True, exist_ok=True)
    data = (args.tasks / "last_word.jsonl").resolve()
    with data.open("w") as stream:
        stream.writelines(json.dumps(item) + "\n" for item in itertools.islice(found, N_PASSAGES))
    (args.tasks / "last_word.yaml").write_text(TASK.format(data=data))


if __name__ == "__main__":
    main()
