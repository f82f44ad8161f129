"""Lets the language model of a finished run answer prompts of its test texts, and scores its answers.

At every step the most likely token is written, until the end-of-sequence token or a number of tokens.
Prompts of a batch are padded on the left, with positions and a mask that leave the pads out. So a prompt has
the same answer in any batch, unless two logits differ by rounding only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.data.load_dataset import with_tokens
from rayfed.data.source import source_of
from rayfed.data.text import PAD, padded_length
from rayfed.data.tokenizer import load_tokenizer
from rayfed.data.tokens import Tokenized
from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.language import TextNet
from rayfed.objective import LANGUAGE_MODELING
from rayfed.record.atomic_files import write_text
from rayfed.record.readers import read_bytes, reading
from rayfed.report.answer_tables import BEGIN, FILE, WrittenAnswer, section, table_of
from rayfed.report.page.render import NAME, write_report
from rayfed.report.reopen import ReopenedRun, evenly, reopen
from rayfed.terminal.arguments import parser_of
from rayfed.terminal.console import say, screen_of, use_screen
from rayfed.terminal.exit_code import run_guarded
from rayfed.terminal.table_formats import terminal_width
from rayfed.tuning.base import load
from rayfed.user_files import user_folder

BATCH = 8
"""Prompts of a batch, always, so that answers do not depend on how many are asked for."""

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def answers(folder: Path, texts: int, tokens: int, choices: str | None = None) -> list[WrittenAnswer]:
    """Let the final model of a run answer prompts of test texts.

    Args:
        folder: Folder of a finished run.
        texts: Most texts of a domain, evenly spaced among its test texts.
        tokens: Most tokens of an answer.
        choices: Candidate answers between `|`, of which the model also chooses one, or `all` for the
            different answers of the data set; None: it chooses none.

    Raises:
        ConfigError: The run cannot be analysed, its model writes no texts, or there are no candidates.
    """
    run = reopen(folder)
    setup = run.setup
    if setup.dataset.task != LANGUAGE_MODELING:
        raise ConfigError(
            f"data: {run.config.data.name!r} is for {setup.dataset.task}, whose models write nothing"
        )
    model = setup.context.build()
    load(model, run.state.params)
    model.to(run.device).eval()
    tokenizer = load_tokenizer(str(model.tokenizer))
    source = with_tokens(source_of(run.config.data), run.config.data, model.tokenizer)
    assert isinstance(source, Tokenized)
    asked = [(domain, row) for domain, rows in _test_rows(run, texts).items() for row in rows.tolist()]
    parts = [source.whole(row) for _, row in asked]
    room = model.size - tokens
    if room < 1:
        raise ConfigError(
            f"--tokens: {tokens} leaves no room for a prompt in the {model.size} tokens of model.size"
        )
    prompts = [source.shortened(prompt, room) for prompt, _ in parts]
    keys = setup.dataset.keys

    def text(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    if not any(text(prompt).strip() for prompt in prompts):
        raise ConfigError(
            f"data: no test text of {run.config.data.name!r} has a prompt, so there is nothing to answer; "
            f"data with prompts and completions, or with messages, have some"
        )
    found = greedy(model, prompts, tokens, tokenizer.eos_token_id)
    rows = [
        replace(
            _score(domain, keys[row], text(prompt), text(expected), text(written)),
            prompt_cut=len(prompt) < len(whole),
            expected_longer=len(expected) > tokens,
        )
        for (domain, row), prompt, (whole, expected), written in zip(
            asked, prompts, parts, found, strict=True
        )
    ]
    if choices is None:
        return rows
    ids = _candidates(choices, source, len(setup.dataset), tokenizer)
    named = [text(own) for own in ids]
    room = max(1, model.size - max(map(len, ids)))
    scores = [likelihoods(model, source.shortened(prompt, room), ids) for prompt, _ in parts]
    return [
        _with_choice(row, named[int(np.argmax(own))], named) for row, own in zip(rows, scores, strict=True)
    ]


EVERY = "all"
"""Value of `--choices` for the different answers of the data set."""
MOST_CHOICES = 200
"""Largest number of candidate answers."""


def _candidates(choices: str, source: Tokenized, texts: int, tokenizer: Any) -> list[list[int]]:
    """Tokens of each candidate answer, in an order that depends on the answers only."""
    if choices == EVERY:
        answers = (tuple(source.whole(row)[1]) for row in range(texts))
        found = [list(own) for own in sorted({own for own in answers if own})]
    else:
        given = dict.fromkeys(text.strip() for text in choices.split("|"))
        encoded = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in given if text)
        found = [[*own, tokenizer.eos_token_id] for own in encoded]
    if not 2 <= len(found) <= MOST_CHOICES:
        raise ConfigError(
            f"--choices: {choices!r} are {len(found)} different answers; name 2 to {MOST_CHOICES} of them "
            f"with | in between"
        )
    return found


@torch.no_grad()
def likelihoods(model: Backbone, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[float]:
    """Score of each candidate answer after a prompt.

    It is the sum of the log-likelihoods of its tokens, the end-of-sequence token among them, divided by their
    number, so that long answers are not at a disadvantage.

    Args:
        model: A language model, in evaluation mode, with all blocks.
        prompt: Token ids; the beginning is cut where they and an answer are too long.
        candidates: Token ids of each answer, with the end-of-sequence token.

    Raises:
        ConfigError: A candidate leaves no room for a token before it.
    """
    if (longest := max(map(len, candidates))) >= model.size:
        raise ConfigError(f"--choices: an answer has {longest} tokens; model.size is {model.size}")
    device = next(model.parameters()).device
    found = []
    for start in range(0, len(candidates), BATCH):
        some = candidates[start : start + BATCH]
        before = list(prompt)[longest - model.size :] or [some[0][-1]]
        length = padded_length(len(before) + max(map(len, some)), model.size)
        ids = torch.full((len(some), length), PAD)
        for row, own in zip(ids, some, strict=True):
            row[: len(before) + len(own)] = torch.tensor([*before, *own])
        logs = model(ids.to(device)).float().log_softmax(-1)
        for place, own in enumerate(some):
            steps = logs[place, len(before) - 1 : len(before) - 1 + len(own)]
            picked = steps.gather(1, torch.tensor(own, device=device)[:, None])
            found.append(float(picked.sum()) / len(own))
    return found


def _with_choice(row: WrittenAnswer, chosen: str, named: Sequence[str]) -> WrittenAnswer:
    known = plain(row.expected) in map(plain, named)
    return replace(row, chosen=chosen, choice=int(plain(row.expected) == plain(chosen)) if known else None)


def _test_rows(run: ReopenedRun, count: int) -> dict[str, Any]:
    """Row numbers of test texts by domain, of clients or of the domains themselves."""
    setup = run.setup
    rows: dict[str, list[Any]] = {}
    for unit in setup.experiment.sets:
        rows.setdefault(unit.domain, []).append(setup.context.splits[unit.id]["test"])
    return {domain: evenly(np.unique(np.concatenate(own)), count) for domain, own in rows.items()}


@torch.no_grad()
def greedy(model: Backbone, prompts: Sequence[Sequence[int]], most: int, end: int) -> list[list[int]]:
    """The tokens that a language model writes after each prompt, without the end-of-sequence token.

    Args:
        model: A language model, in evaluation mode, with all blocks.
        prompts: Token ids of each prompt; an empty one begins with `end`.
        most: Most tokens of an answer.
        end: The end-of-sequence token.
    """
    written = []
    for start in range(0, len(prompts), BATCH):
        some = [list(prompt) or [end] for prompt in prompts[start : start + BATCH]]
        written += _batch(model, some, most, end)
    return written


def _batch(model: Backbone, prompts: list[list[int]], most: int, end: int) -> list[list[int]]:
    from transformers import DynamicCache

    net: Any = model.net
    assert isinstance(net, TextNet)
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    rows = [[net.pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(rows, device=device)
    there = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = DynamicCache(config=net.trunk.config)
    found: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    for _ in range(most):
        positions = (there.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        token = _next(model, ids, there, positions, cache)
        for row, value in enumerate(token.tolist()):
            done[row] = done[row] or value == end
            if not done[row]:
                found[row].append(value)
        if all(done):
            break
        ids = token[:, None]
        there = torch.cat((there, torch.ones_like(ids)), 1)
    return found


def _next(model: Backbone, ids: Tensor, there: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """The most likely next token of each row, shape (B,)."""
    net: Any = model.net
    states = net.trunk(
        input_ids=ids, attention_mask=there, position_ids=positions, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
    if model.adapter is not None:
        states = model.adapter(states)
    return model.head(states).float().argmax(-1)


def _score(domain: str, key: str, prompt: str, expected: str, written: str) -> WrittenAnswer:
    numbers = last_number(expected), last_number(written)
    return WrittenAnswer(
        domain=domain,
        key=key,
        prompt=prompt,
        expected=expected,
        written=written,
        exact_match=int(plain(expected) == plain(written)),
        last_number=None if numbers[0] is None else int(numbers[0] == numbers[1]),
        rouge_l=rouge_l(expected, written),
    )


def plain(text: str) -> str:
    """A text in lower case, with single spaces and without punctuation at its ends.

    >>> plain("  The  answer: 3. ")
    'the answer: 3'
    """
    return " ".join(text.lower().split()).strip(" .,;:!?\"'")


def last_number(text: str) -> float | None:
    """The last number in a text, without commas; None: there is none.

    >>> last_number("so 1,200 of them #### 72."), last_number("none")
    (72.0, None)
    """
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").rstrip(".")) if found else None


def rouge_l(expected: str, written: str) -> float:
    """F1 of the longest common subsequence of words (Lin, ROUGE, 2004, section 3.1, with beta = 1).

    Words are runs of letters and digits in lower case; there is no stemming.

    >>> rouge_l("the cat sat on the mat", "a cat on a mat")
    0.5454545454545454
    """
    one, other = (re.findall(r"[a-z0-9]+", text.lower()) for text in (expected, written))
    if not one or not other:
        return float(one == other)
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for place, own in enumerate(other):
            row.append(before[place] + 1 if own == word else max(before[place + 1], row[place]))
    common = row[-1]
    return 2 * common / (len(one) + len(other))


USAGE = """\
python -m rayfed.report.answers RUN [--texts 8] [--tokens 64] [--choices all] [--debug]

Lets the final model of a finished run write answers to test texts of every
domain, scores them, and adds scores and answers to its reports, for example
  python -m rayfed.report.answers runs/mine --texts 20 --tokens 128
  python -m rayfed.report.answers runs/mine --choices "yes|no|maybe"
"""


def add(folder: Path, rows: Sequence[WrittenAnswer]) -> None:
    """Write answers.jsonl, and put the section into report.md and report.html in place of an earlier one."""
    write_text(folder / FILE, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    report = folder / "report.md"
    with reading(report):
        text = read_bytes(report).decode() if report.exists() else ""
    write_text(report, text.partition(BEGIN)[0] + section(rows))
    if (page := folder / NAME).exists():
        write_report([folder], page)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer from the command line. Exit code: 0 answered, 1 failed, 2 bad input, 130 interrupted."""
    parser = parser_of("rayfed.report.answers", USAGE)
    parser.add_argument("run", type=user_folder, help="a finished run of a language model")
    parser.add_argument("--texts", type=int, default=8, help="most test texts of a domain")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--choices", help="candidate answers with | in between, or all")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.texts < 1 or args.tokens < 1:
            raise ConfigError(f"--texts, --tokens: {args.texts} and {args.tokens} must be at least 1")
        with use_screen(screen_of()):
            rows = answers(args.run, args.texts, args.tokens, args.choices)
        add(args.run, rows)
        say(table_of(rows).text(terminal_width()))

    return run_guarded(work, args.debug, "the run itself is unchanged")


if __name__ == "__main__":
    sys.exit(main())
