"""Table of the rounds for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from examples.kv_aware_router.rounds import Round

_COLUMNS: tuple[tuple[str, Callable[[Round], str]], ...] = (
    ("hit rate", lambda each: f"{each.tally.hit_rate:.1%}"),
    ("computed", lambda each: f"{each.tally.computed_tokens:,}"),
    ("TTFT p50", lambda each: _time(each.tally.percentile_ms(50))),
    ("p90", lambda each: _time(each.tally.percentile_ms(90))),
    ("p99", lambda each: _time(each.tally.percentile_ms(99))),
    ("busiest", lambda each: f"{each.tally.imbalance:.2f} x mean"),
    ("served", lambda each: f"{each.tally.requests:,}"),
    ("elsewhere", lambda each: f"{each.tally.retried:,}"),
    ("lost", lambda each: f"{each.tally.lost:,}"),
)


def table(rounds: Sequence[Round]) -> str:
    """Return a table with one line per round."""
    rows = [["", *(name for name, _ in _COLUMNS)]]
    rows += [[each.name, *(value(each) for _, value in _COLUMNS)] for each in rounds]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def by_worker(rounds: Sequence[Round]) -> str:
    """Return the prompt tokens that each worker computed."""
    lines = []
    for each in rounds:
        tokens = sorted(each.tally.computed_by.items())
        lines.append(f"{each.name}: " + ", ".join(f"{name} {count:,}" for name, count in tokens))
    return "\n".join(lines)


def gain(base: Round, better: Round) -> str:
    """Return a sentence that compares two rounds."""
    saved = base.tally.computed_tokens - better.tally.computed_tokens
    share = saved / base.tally.computed_tokens if base.tally.computed_tokens else 0.0
    times = (
        f"{_time(base.tally.percentile_ms(percent))} to {_time(better.tally.percentile_ms(percent))} (p{percent})"
        for percent in (50, 99)
    )
    return (
        f"{better.name} beside {base.name}: {saved:,} fewer prompt tokens computed ({share:.1%}); "
        f"time to first token from {' and from '.join(times)}"
    )


def notes(rounds: Sequence[Round]) -> str:
    """Return the recorded incidents, one per line."""
    return "\n".join(f"{each.name}, {ms / 1000:,.1f} s: {text}" for each in rounds for ms, text in each.notes)


def _time(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms"
