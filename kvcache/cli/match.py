"""``kvcache match``: reuse of a prompt in the state of a log, block by block."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from events.log import LogReader
from events.structs import LEVEL_NAMES
from events.tokens.rich import RichTokens
from events.tokens.symbols import SymbolTable, has_symbols
from events.types import CROSS, EventBatch, Gap, Namespace, SequenceAdded
from kvcache.audit.admission import Lacking, SharedGroups
from kvcache.audit.explanation import group_in_words
from kvcache.cli import feed_log, times
from kvcache.cli.options import (
    TOKENS_HELP,
    add_namespace,
    add_shared,
    has_namespace,
    option,
    origin,
    read_tokens,
)
from kvcache.cli.output import Facts, Output, Row, pick, stamp
from kvcache.cli.replay import describe_point
from kvcache.cli.times import Times, UpTo
from kvcache.decide.lookup import lookup
from kvcache.errors import Unsupported, UsageError
from kvcache.fold.state import CacheState
from kvcache.inputs import namespace_of, pack_tokens
from kvcache.phrases import count, printable, share
from kvcache.replay import Replayed, fitting, fold
from kvcache.results import Match, MatchedBlock

GivenPrompt = tuple[Namespace, RichTokens]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = "Look up a prompt in the cache as it was after a batch. Read-only."
    parser.epilog = (
        "The last token of a prompt is never reused: the model has to compute at least one token.\n\n"
        + times.FORMS_HELP
    )
    add_shared(parser, "log", "time", "json", at="batch after which to look (default: the last one)")
    add = partial(option, parser.add_mutually_exclusive_group(required=True))
    add(
        "--request ID", "request whose prompt to look up: its last admission up to --at, or else its next one"
    )
    add("--tokens FILE", TOKENS_HELP, type=str)
    add_namespace(parser, "--tokens")


def run(args: argparse.Namespace, out: Output) -> int:
    """Fold, look up, print."""
    if args.request is not None and has_namespace(args):
        raise UsageError("--lora-id, --lora-name and --cache-salt require --tokens: a request has its own")
    # Read first: errors of a file are reported before a long log is read.
    given: GivenPrompt | None = None
    if args.tokens is not None:
        tokens = RichTokens(pack_tokens(read_tokens(args.tokens)))
        given = namespace_of(args.lora_id, args.lora_name, args.cache_salt), tokens
    if feed_log.is_feed_log(args.log):
        if given is None:
            raise UsageError(
                "this log records events published by engines, which do not include requests: give the prompt with "
                "--tokens"
            )
        return feed_log.match(args, out, *given)
    # A request is searched from the beginning of the log.
    reader = LogReader(args.log) if given is None else times.state_before(args.log, args.at)
    batches = UpTo(reader, args.at)
    search = _Search(batches, args.request)
    with out.progress("replaying") as update:
        replayed = fold(search.watched(), progress=update)
    batches.check()
    if replayed.state.created is None:
        raise UsageError(f"{args.log} has no cache: its first batch is missing")
    if given is not None and replayed.state.created.groups[-1].kind == CROSS:
        instead = "give a request's with --request: which blocks are shared depends on the encoder's input"
        raise Unsupported("a prompt given with --tokens for an encoder-decoder model", instead)
    namespace, prompt = given if given is not None else search.prompt(args.request)
    with fitting(replayed.last_seq):
        found = _lookup(replayed.state, namespace, prompt)
    if args.json:
        out.json(to_json(replayed, found))
    else:
        title = origin(args.tokens) if args.request is None else f"request {args.request}"
        when = describe_point(replayed, Times(args.time, batches.first_ts))
        prompt_tokens = count(found.num_tokens, "prompt token")
        out.heading(f"{printable(title)}: {prompt_tokens}, looked up after {when}")
        _show(replayed, found, out)
    return 0


class _Search:
    """Search for a request's admission while its log is folded, and after that point if there was none."""

    def __init__(self, batches: UpTo, request_id: str | None) -> None:
        self._batches = batches
        self._id = request_id
        self._symbols = SymbolTable()
        """Symbols as of the last batch read: their numbers may get other meanings."""
        self._found: GivenPrompt | None = None

    def watched(self) -> Iterator[EventBatch]:
        """Yield the batches, and search them."""
        for batch in self._batches:
            with fitting(batch.seq):
                self._look(batch)
            yield batch

    def _look(self, batch: EventBatch) -> None:
        # Events of a batch before a gap continue missing ones; symbols begin with the whole state after the gap.
        known = max((index for index, event in enumerate(batch.events) if isinstance(event, Gap)), default=-1)
        for index, event in enumerate(batch.events):
            if index > known:
                self._symbols.fold(event)
            elif isinstance(event, SequenceAdded) and has_symbols(event.tokens):
                continue
            if isinstance(event, SequenceAdded) and str(event.request_id) == self._id:
                self._found = event.namespace, self._symbols.spell(event.tokens)

    def prompt(self, request_id: str) -> GivenPrompt:
        """Return the prompt of the last admission seen, or of the next one. Raises UsageError if there is none."""
        for batch in self._batches.rest() if self._found is None else ():
            with fitting(batch.seq):
                self._look(batch)
            if self._found is not None:
                break
        if self._found is None:
            raise UsageError(f"request {request_id!r} was never admitted in the log")
        if not self._found[1].tokens:
            raise UsageError(
                f"the log does not record tokens, so the prompt of request {request_id!r} is unknown: "
                "give it with --tokens"
            )
        return self._found


def _lookup(state: CacheState, namespace: Namespace, prompt: RichTokens) -> Match:
    assert state.created is not None
    config = json.loads(state.created.config)
    if not config.get("enable_block_reuse", True):
        return Match(len(prompt))
    return lookup(state, namespace, prompt, partial=config.get("enable_partial_reuse", True))


def to_json(replayed: Replayed, found: Match) -> dict[str, Any]:
    """Return the reuse."""
    primary, secondary = found.tokens_by_level
    return {
        **stamp(replayed.last_seq, replayed.last_ts),
        **pick(found, "reused_tokens", prompt_tokens="num_tokens"),
        "reused_tokens_primary": primary,
        "reused_tokens_secondary": secondary,
        "reused_tokens_partial": 0 if found.partial is None else found.partial.num_tokens,
        "blocks": [_block_json(block) for block in found.blocks],
        "partials": [_block_json(block) for block in found.partials],
    }


def _block_json(block: MatchedBlock) -> dict[str, Any]:
    named = {"level": LEVEL_NAMES[block.level], "name": block.name or None}
    return pick(block, "slot", "num_tokens", "landed", "window", block="index") | named


def _show(replayed: Replayed, found: Match, out: Output) -> None:
    out.facts(_facts(replayed.state, found))
    blocks = sorted([*found.blocks, *found.partials], key=lambda block: (block.window, block.index))
    # A single window needs no name.
    several = len({block.window for block in blocks}) > 1
    rows = [_row(block, replayed.state.tokens_per_block, several=several) for block in blocks]
    out.table(rows, right=("block", "slot"), gap=True)


def _facts(state: CacheState, found: Match) -> Facts:
    part = found.reused_tokens / found.num_tokens if found.num_tokens else 0.0
    yield "would reuse", f"{count(found.reused_tokens, 'token')}: {share(part)}"
    levels = "{:,} from primary, {:,} from secondary".format(*found.tokens_by_level)
    partial = found.partial.num_tokens if found.partial is not None else 0
    yield "", f"{levels}, {partial:,} in a partial block"
    if (lacking := _lacking(state, found)) is not None:
        left = count(lacking.first_block * state.tokens_per_block, "token")
        group = group_in_words(lacking.group, lacking.kind)
        yield "of that", f"{left}: {group} lacks what the following tokens need"
    yield "would compute", count(found.num_tokens - found.reused_tokens, "token")
    firsts: dict[int, int] = {}
    for block in (*found.blocks, *found.partials):
        firsts.setdefault(block.window, block.index)
    for window, first in firsts.items():
        if first:  # it slides
            yield (
                f"window {window:,}",
                f"does not need blocks before {first:,} from there on",
            )


def _lacking(state: CacheState, found: Match) -> Lacking | None:
    """Return where a further group could not continue."""
    if not found.blocks or not state.positional or state.created is None:
        return None
    groups = SharedGroups()
    for event in state.export_shared():
        groups.begin(event, len(state.groups), state.created.key_bytes)
    names = np.frombuffer(bytes.fromhex("".join([each.name for each in found.blocks])), np.uint64)
    return groups.lacking(names, 0, state.tokens_per_block)


def _row(block: MatchedBlock, size: int, *, several: bool) -> Row:
    start = block.index * size
    remarks = [] if block.num_tokens == size else [f"its first {count(block.num_tokens, 'token')}"]
    remarks += [] if block.landed else ["still being copied"]
    return {
        "block": str(block.index),
        "tokens": f"{start}–{start + block.num_tokens - 1}",
        **({"window": block.window} if several else {}),
        "level": LEVEL_NAMES[block.level],
        "slot": str(block.slot),
        "name": block.name,
        "": ", ".join(remarks),
    }
