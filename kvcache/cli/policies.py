"""``kvcache curve --policy``: the prompts of a log or a trace under other eviction orders."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvcache.audit.block_cache import COMPILED
from kvcache.audit.curve import LoggedPrompts
from kvcache.audit.policies import POLICIES, Policy, RequestRecorder
from kvcache.cli.options import number, option
from kvcache.cli.output import Output
from kvcache.errors import UsageError
from kvcache.workload.traces import TracePrompts


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for eviction orders."""
    option(
        parser,
        "--policy NAMES",
        f"eviction policies to compare at --sizes, or at all sizes of the table: {', '.join(POLICIES)}; a number "
        "after a colon sets a parameter, as in stop:300",
        type=_policies,
        default=(),
    )
    option(
        parser,
        "--hold SPEED",
        "with --policy and a trace: tokens per second that requests generate, holding their blocks meanwhile",
        type=number("a number of tokens per second", lambda speed: 0 < speed < 1e9),
    )


def _policies(text: str) -> tuple[Policy, ...]:
    names = dict.fromkeys(part.strip() for part in text.split(","))
    try:
        return tuple(map(Policy.named, names))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(slots=True)
class PolicyTrials:
    """Replay of the requested policies, once all prompts are known."""

    policies: tuple[Policy, ...]
    hold: float | None
    """Tokens per second that a request generates while it holds its blocks; None: requests hold nothing."""
    recorder: RequestRecorder = field(default_factory=RequestRecorder)

    @classmethod
    def of(cls, args: argparse.Namespace) -> PolicyTrials:
        """Return the trials of the command line. Raises `UsageError` for incompatible options."""
        if args.policy and args.sample < 1:
            raise UsageError("--policy needs all blocks, not samples: omit --sample")
        if args.policy and args.ttl:
            raise UsageError("--ttl cannot be combined with --policy: it assumes an unbounded cache")
        if args.hold is not None and not args.policy:
            raise UsageError("--hold requires --policy")
        if args.hold is not None and args.bound:
            raise UsageError(
                "--bound cannot be combined with --hold: it assumes that requests hold no blocks"
            )
        return cls(args.policy, args.hold)

    def add(self, prompts: LoggedPrompts | TracePrompts, blocks: Sequence[int]) -> None:
        """Add the prompt iterated over last. Raises `UsageError` for one of a log, if it is to be held."""
        if not self.policies:
            return
        if isinstance(prompts, LoggedPrompts):
            if self.hold is not None:
                raise UsageError("--hold works with traces only: give a trace, or omit it")
            self.recorder.add(blocks, arrival=prompts.at / 1e9)
        elif (request := prompts.request) is not None:
            held = request.output_length / self.hold if self.hold else 0.0
            self.recorder.add(blocks, arrival=prompts.at / 1e9, held=held, stop=request.stop)

    def play(self, sizes: Iterable[int], tokens_per_block: int, out: Output) -> dict[int, dict[str, int]]:
        """Return hits by size and policy. Raises `UsageError` if a policy needs data that the prompts lack."""
        if not self.policies:
            return {}
        if not COMPILED:
            out.warning("this is a hundred times slower without numba: pip install 'kvcache[simulate]'")
        workload = self.recorder.workload(tokens_per_block)
        pairs = [(blocks, policy) for blocks in sorted(set(sizes)) for policy in self.policies]
        hits: dict[int, dict[str, int]] = {}
        with out.progress("playing", len(pairs)) as update:
            for done, (blocks, policy) in enumerate(pairs):
                hits.setdefault(blocks, {})[policy.name] = int(policy.hits(workload, blocks).sum())
                update(done + 1)
        return hits
