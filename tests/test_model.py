"""The model by itself: cases worked out by hand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from events.types import PRIMARY, SECONDARY
from tests.oracles.cache_model import Model, Refused
from tests.oracles.window_model import Path, Window

LIMIT = 128
"""Tokens of the longest sequence."""
NAMESPACE = "a namespace"


def cache(size: int, blocks: tuple[int, int], *windows: int, reuse: bool = True, limit: int = LIMIT) -> Model:
    return Model(size, blocks, windows, limit, reuse=reuse)


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    """Tokens that are all different."""
    return list(range(first, first + num_tokens))


def begin(model: Model, name: Hashable, tokens: Sequence[int]) -> int:
    """Admit a request; returns how many tokens it reuses."""
    return model.add([(name, NAMESPACE, tokens, None, None, None)])[0].reused.tokens


def prefill(model: Model, name: Hashable, tokens: Sequence[int]) -> int:
    """The same, and compute all of it."""
    reused = begin(model, name, tokens)
    model.compute(name, len(tokens))
    return reused


def generate(model: Model, name: Hashable, tokens: Sequence[int]) -> None:
    """Append tokens in as many steps."""
    for token in tokens:
        model.append([name], [token], [1])


def would_reuse(model: Model, tokens: Sequence[int]) -> int:
    return model.match(NAMESPACE, tokens).tokens


def blocks_of(paths: Sequence[Path]) -> list[int]:
    """Their places in the prompt."""
    return sorted(len(path) - 2 for path in paths)


def unreferenced(window: Window) -> list[int]:
    return blocks_of([path for path, block in window.cached.items() if not block.refs])


# -- what a sequence holds


def test_window_below_a_block() -> None:
    """With a window of 3 and blocks of 4 a sequence holds one block, or two while the window lies in both."""
    model = cache(4, (16, 0), 3, reuse=False)
    (window,) = model.windows
    begin(model, "a", prompt(2))
    seen = {}
    for length in range(3, 14):
        generate(model, "a", [length])
        seen[length] = window.detached("a"), len(window.tables["a"]), 16 - window.blank(PRIMARY)
    assert seen == {
        3: (0, 1, 1),
        4: (0, 1, 1),
        5: (0, 2, 2),
        6: (0, 2, 2),
        7: (1, 2, 1),
        8: (1, 2, 1),
        9: (1, 3, 2),
        10: (1, 3, 2),
        11: (2, 3, 1),
        12: (2, 3, 1),
        13: (2, 4, 2),
    }
    model.end("a", store=False)
    assert window.blank(PRIMARY) == 16


def test_window_of_one_token() -> None:
    """Who attends to nothing but itself holds the block that is being written."""
    model = cache(2, (16, 0), 1)
    (window,) = model.windows
    prefill(model, "a", prompt(5))
    assert window.tables["a"][:2] == [None, None]
    generate(model, "a", prompt(3))
    assert (window.detached("a"), len(window.tables["a"])) == (3, 4)
    assert would_reuse(model, prompt(5)) == 4, "nothing that is cached is read, so nothing has to be"


def test_window_of_many_blocks() -> None:
    """A window that the sequence has not outgrown by a block costs what a full one does."""
    model = cache(64, (80, 0), 575, limit=1000)
    free = []
    prefill(model, "a", prompt(575))
    free.append(model.windows[0].available())
    for _ in range(2):
        generate(model, "a", [0])
        free.append(model.windows[0].available())
    assert free == [71, 71, 70]
    generate(model, "a", [0] * 61)
    assert model.windows[0].detached("a") == 0, "638 tokens: the first block's last one is still attended to"
    generate(model, "a", [0])
    assert model.windows[0].detached("a") == 1
    model.end("a", store=False)
    assert model.windows[0].available() == 80


def test_long_step_lets_go_of_several_blocks() -> None:
    """What a window has left by a step goes at once, with one stamp for all of it."""
    model = cache(4, (8, 0), 4)
    (window,) = model.windows
    begin(model, "a", prompt(12))
    assert window.detached("a") == 0, "the first token to be computed attends to the first block"
    generate(model, "a", [12])
    assert (window.let_go, model.stamp) == ([("a", 2)], 1)
    assert [block.stamp for block in window.cached.values()] == [1, 1, 0]


def test_window_as_long_as_a_block() -> None:
    """With the prompt computed first, a block goes when the one behind it is full, and serves others."""
    model = cache(4, (8, 0), 4)
    (window,) = model.windows
    prefill(model, "a", prompt(11))
    generate(model, "a", [11])
    assert window.let_go == [("a", 1), ("a", 1)]
    model.end("a", store=True)
    assert unreferenced(window) == [0, 1, 2]
    assert would_reuse(model, prompt(4)) == 3
    assert begin(model, "b", prompt(12)) == 11
    assert blocks_of([entry for entry in window.tables["b"] if isinstance(entry, tuple)]) == []
    assert len(window.tables["b"]) - window.detached("b") == 1, "it attends to no more than its own block"


def test_blocks_without_a_name_become_blank() -> None:
    """After the cache was cleared, what is let go of is blank, unless it is another sequence's too."""
    model = cache(4, (8, 0), 4)
    (window,) = model.windows
    prefill(model, "a", prompt(10))
    begin(model, "b", prompt(10))
    model.clear()
    # The second block is both's, and each has a third of its own.
    assert [window.tables[name][0] for name in "ab"] == [None, None]
    assert window.tables["a"][1] == window.tables["b"][1]
    assert window.blank(PRIMARY) == 5
    model.compute("b", 10)
    assert not window.cached, "a block of two sequences is stored by neither"
    generate(model, "a", [10, 11])
    assert (window.detached("a"), window.blank(PRIMARY)) == (2, 5)
    generate(model, "a", [12])
    assert blocks_of(list(window.cached)) == [2], "what is stored hangs behind content without blocks"
    assert would_reuse(model, [*prompt(12), 99]) == 12
    model.compute("b", 10)
    assert blocks_of(list(window.cached)) == [1, 2], "what is left to one is stored by it"


def test_without_reuse_blocks_become_blank() -> None:
    """With nothing cached, what is let go of can be had at once."""
    model = cache(4, (8, 0), 4, reuse=False)
    prefill(model, "a", prompt(12))
    assert (model.windows[0].detached("a"), model.windows[0].blank(PRIMARY)) == (2, 7)


# -- what is reused


def test_reuse_below_the_window() -> None:
    """Prefixes no longer than the window reuse as in a full one."""
    model = cache(4, (16, 16), 16)
    (window,) = model.windows
    prefill(model, "a", prompt(20))
    assert len(window.tables["a"]) == 5
    generate(model, "a", prompt(4, first=20))
    assert len(window.tables["a"]) == 6
    model.end("a", store=True)
    assert unreferenced(window) == [0, 1, 2, 3, 4, 5]
    for length in (7, 10, 15):
        assert prefill(model, length, prompt(length)) == length - 1
        model.end(length, store=True)


def test_two_windows_serve_a_prefix() -> None:
    """What both have is reused, though one has let go of it while the sequence ran."""
    model = cache(4, (16, 16), 8, 16)
    prefill(model, "a", prompt(11))
    generate(model, "a", prompt(4, first=11))
    assert [window.detached("a") for window in model.windows] == [1, 0]
    model.end("a", store=True)
    assert begin(model, "b", prompt(7)) == 6


def test_block_that_was_let_go_of_is_reused() -> None:
    """A block that its sequence has let go of stays cached for others."""
    model = cache(4, (8, 0), 8)
    (window,) = model.windows
    prefill(model, "a", prompt(11))
    assert window.detached("a") == 0
    generate(model, "a", [11])
    assert (window.detached("a"), unreferenced(window)) == (1, [0])
    model.end("a", store=True)
    assert begin(model, "b", prompt(4)) == 3


def test_hole_before_the_window_is_no_obstacle() -> None:
    """A prefix is served without blocks that no token to come attends to; a shorter one that needs them is not."""
    model = cache(4, (16, 0), 12)
    (window,) = model.windows
    prefill(model, "a", prompt(28))
    assert window.detached("a") == 4
    model.end("a", store=True)
    begin(model, "other", prompt(40, first=100))
    assert window.removed == [{(NAMESPACE, (0, 1, 2, 3))}], "the shallowest of what was let go of first"
    model.end("other", store=False)
    assert would_reuse(model, prompt(16)) == 0, "its 15 tokens begin with the hole, and 12 reach back to it"
    assert would_reuse(model, prompt(17)) == 16
    assert begin(model, "b", prompt(28)) == 27, "24, and 3 of the last block"
    held = [entry for entry in window.tables["b"] if isinstance(entry, tuple)]
    assert (window.detached("b"), blocks_of(held)) == (4, [4, 5])


def test_hole_is_filled_by_who_computes_it() -> None:
    """A sequence that had to begin anew stores what is missing, and holds the others' blocks where they are."""
    model = cache(4, (16, 0), 12)
    (window,) = model.windows
    prefill(model, "a", prompt(28))
    model.end("a", store=True)
    begin(model, "other", prompt(40, first=100))
    model.end("other", store=False)
    assert begin(model, "b", prompt(15)) == 0
    assert model.compute("b", 15) == [[1, 2]]
    assert blocks_of(list(window.cached)) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("windows", "copied"), [((128,), 3), ((8,), 3), ((8, 128), 2), ((8, 16), 2)])
def test_all_windows_have_to_copy(windows: tuple[int, ...], copied: int) -> None:
    """The start of a block is copied as far as the window with the least of it has it, from any block that has it."""
    model = cache(4, (16, 0), *windows)
    last = model.windows[-1]
    prefill(model, "a", prompt(8))
    model.end("a", store=True)
    if len(windows) > 1:
        last.remove([(NAMESPACE, (0, 1, 2, 3), (4, 5, 6, 7))])
        prefill(model, "b", [*prompt(6), 99, 99])
        model.end("b", store=True)
    found = model.match(NAMESPACE, prompt(8))
    assert (found.tokens, found.copied) == (4 + copied, copied)
    assert [len(paths) for paths in found.sources] == [len(windows), 1][: len(windows)]
    if windows == (8, 128):
        assert begin(model, "c", prompt(8)) == 6


def test_a_full_window_needs_all_blocks() -> None:
    """Beside a full window, one that slides cannot serve a prefix alone."""
    model = cache(4, (16, 0), 4, LIMIT)
    sliding, full = model.windows
    prefill(model, "a", prompt(13))
    model.end("a", store=True)
    paths = sorted(full.cached, key=len)
    sliding.remove(paths[:2])
    assert would_reuse(model, prompt(13)) == 12
    full.remove(paths[2:])
    assert would_reuse(model, prompt(13)) == 0, "8 and 4 tokens attend to what only the full window has"


def test_admission_counts_each_window() -> None:
    """A batch that one window has no room for is refused, and says what each of them lacks."""
    model = cache(4, (6, 4), 4, LIMIT)
    sliding, full = model.windows
    prefill(model, "a", prompt(16))
    assert [window.available() for window in model.windows] == [5, 2]
    with pytest.raises(Refused) as refused:
        model.add(
            [
                ("b", NAMESPACE, prompt(17), None, None, None),
                ("c", NAMESPACE, prompt(9, first=50), None, None, None),
            ]
        )
    assert refused.value.args == (1, (4, 4), (5, 2))
    assert "b" not in model.running
    assert begin(model, "b", prompt(17)) == 16
    assert (sliding.detached("b"), full.detached("b")) == (3, 0)


# -- what goes


def test_order_in_which_blocks_go() -> None:
    """In a window that slides the shallowest goes first, after priority and stamp, whatever hangs behind."""
    model = cache(4, (6, 0), 16)
    (window,) = model.windows
    prefill(model, "a", prompt(12))
    model.set_priority("a", 34, 8, 12)
    model.end("a", store=True)
    prefill(model, "b", prompt(4, first=50))
    model.end("b", store=True)
    window.evict(6)
    assert [blocks_of(list(paths)) for paths in window.removed] == [[2], [0], [1], [0]]


def test_stamps_rise_window_by_window() -> None:
    """Each sequence that lets go of something in a window has a stamp of its own, one window after the other."""
    model = cache(2, (16, 0), 2, 4)
    for name, first in (("a", 0), ("b", 50)):
        begin(model, name, prompt(6, first=first))
        model.running[name].computed = 6
        for window in model.windows:
            window.store(name, model.running[name])
    model.detach(["b", "a"])
    stamps = [
        {path[1][0]: block.stamp for path, block in window.cached.items() if len(path) == 2}
        for window in model.windows
    ]
    assert stamps == [{50: 1, 0: 2}, {50: 3, 0: 4}]
    assert [window.let_go for window in model.windows] == [[("b", 2), ("a", 2)], [("b", 1), ("a", 1)]]


def test_what_goes_takes_nothing_with_it() -> None:
    """A block of a window that slides goes to secondary, or away, alone; what it lay before stays where it is."""
    model = cache(2, (4, 1), 4)
    (window,) = model.windows
    prefill(model, "a", prompt(8))
    model.end("a", store=True)
    window.evict(2)
    assert [blocks_of([path]) for path in window.offloaded] == [[0], [1]]
    assert [blocks_of(list(paths)) for paths in window.removed] == [[0]], "the higher one displaces the lower"
    assert [len(path) - 2 for path, block in window.cached.items() if block.level == SECONDARY] == [1]
    assert would_reuse(model, prompt(9)) == 8
    assert would_reuse(model, prompt(3)) == 0
