"""``kvcache curve --policy``: the prompts of a log or a trace under other eviction orders."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcache.audit.block_cache import COMPILED
from kvcache.audit.curve import LoggedPrompts
from kvcache.audit.policies import POLICIES, Policy, RequestRecorder
from kvcache.cli.options import option
from kvcache.cli.output import Output
from kvcache.errors import UsageError
from kvcache.workload.traces import TracePrompts


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for eviction orders."""
    option(
        parser,
        "--policy NAMES",
        f"compare orders of eviction, at --sizes or all of the table: {', '.join(POLICIES)}; stop:300 sets its number",
        type=_policies,
        default=(),
    )
    option(
        parser,
        "--hold SPEED",
        "with --policy, of a trace: requests hold their blocks while they generate this many tokens a second",
        type=_speed,
    )


def _policies(text: str) -> tuple[Policy, ...]:
    names = dict.fromkeys(part.strip() for part in text.split(","))
    try:
        return tuple(map(Policy.named, names))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens a second")
    return speed


@dataclass(slots=True)
class PolicyTrials:
    """Replay of the requested policies, once all prompts are known."""

    policies: tuple[Policy, ...]
    hold: float | None
    """Tokens per second; None: nothing is held."""
    recorder: RequestRecorder = field(default_factory=RequestRecorder)

    @classmethod
    def of(cls, args: argparse.Namespace) -> PolicyTrials:
        """Return the trials of the command line. Raises `UsageError` for incompatible options."""
        if args.policy and args.sample < 1:
            raise UsageError("other orders of eviction need all blocks, not samples: leave --sample out")
        if args.policy and args.ttl:
            raise UsageError("--ttl is of a cache of any size: leave it or --policy out")
        if args.hold is not None and not args.policy:
            raise UsageError("--hold is for --policy: without, requests come one after the other")
        if args.hold is not None and args.bound:
            raise UsageError("the bound is of requests that hold nothing: leave --bound or --hold out")
        return cls(args.policy, args.hold)

    def add(self, prompts: LoggedPrompts | TracePrompts, blocks: Sequence[int]) -> None:
        """Add the prompt iterated over last. Raises `UsageError` for one of a log, if it is to be held."""
        if not self.policies:
            return
        if isinstance(prompts, LoggedPrompts):
            if self.hold is not None:
                raise UsageError("--hold is for traces: give a trace, or leave it out")
            self.recorder.add(blocks, arrival=prompts.at / 1e9)
        elif (request := prompts.request) is not None:
            held = request.output_length / self.hold if self.hold else 0.0
            self.recorder.add(blocks, arrival=prompts.at / 1e9, held=held, stop=request.stop)

    def play(self, sizes: Iterable[int], tokens_per_block: int, out: Output) -> dict[int, dict[str, int]]:
        """Return hits by size and policy. Raises `UsageError` if a policy needs data that the prompts lack."""
        if not self.policies:
            return {}
        if not COMPILED:
            out.warning("this takes a hundred times longer without numba: pip install 'kvcache[simulate]'")
        workload = self.recorder.workload(tokens_per_block)
        pairs = [(blocks, policy) for blocks in sorted(set(sizes)) for policy in self.policies]
        hits: dict[int, dict[str, int]] = {}
        with out.progress("playing", len(pairs)) as update:
            for done, (blocks, policy) in enumerate(pairs):
                hits.setdefault(blocks, {})[policy.name] = int(policy.hits(workload, blocks).sum())
                update(done + 1)
        return hits
