"""The prefill model: what it says token by token, what is charged to which reason, and what is fitted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from events.log import LogReader
from kvcache import KVCacheConfig, KVCacheManager, Recorder
from kvcache.audit.admission import ExplainedAdmission
from kvcache.audit.history import HistoryFold, HistoryListener
from kvcache.audit.prefill import PrefillModel, PrefillSeconds, PrefillTotals, Pricing
from kvcache.audit.prefill_fit import PrefillSample, fit, logged_samples, read_samples
from kvcache.audit.reasons import Reason
from kvcache.audit.totals import Audit, audit_batches
from kvcache.errors import UsageError
from kvcache.manager import Substitutes

MODEL = PrefillModel(10.0, 2.0, 1.0)
REAL = PrefillModel(0.004, 6e-5, 2e-10)


def audited(log: Path, *listeners: HistoryListener) -> tuple[Audit, PrefillSeconds]:
    totals = PrefillTotals(MODEL)
    audit = audit_batches(((batch, True) for batch in LogReader(log)), totals, *listeners)
    return audit, totals.finish()


class TestFormula:
    """What people write."""

    @pytest.mark.parametrize(
        "text",
        [
            "0.004 + 6e-5 n + 2e-10 n m",
            "4ms + 60us n + 0.2ns n m",
            "0.2 ns*n*m+60µs * n + 4E-3",
            " 200ps nm + 6.0e-05n + 0.4e-2",
            "4MS + 60Us N + 2E-10 N m",
            str(REAL),
        ],
    )
    def test_it_is_read(self, text: str) -> None:
        """In any order, with or without units, as it is shown."""
        found = PrefillModel.parse(text)
        assert (found.start, found.per_token, found.per_read) == pytest.approx((0.004, 6e-5, 2e-10))

    def test_terms_may_be_left_out(self) -> None:
        """What is not there is 0."""
        assert PrefillModel.parse("1ms n") == PrefillModel(0.0, 0.001, 0.0)

    @pytest.mark.parametrize(
        "text", ["", "n", "5 m", "1 n + 2 n", "-3 n", "1 n - 2", "0", "1e999", "4 min", "1 n 2", "1 n m n"]
    )
    def test_what_is_none_is_refused(self, text: str) -> None:
        """With an example."""
        with pytest.raises(UsageError, match="2e-10 n m"):
            PrefillModel.parse(text)

    @pytest.mark.parametrize("text", ["1e308 n", "1 + 1000001 n m", "1001000000ms", "1e999"])
    def test_what_takes_too_long_is_refused(self, text: str) -> None:
        """Its sums would be no numbers."""
        with pytest.raises(UsageError, match="' is more than 1,000,000 seconds: write"):
            PrefillModel.parse(text)
        assert PrefillModel.parse("1000000 n").per_token == 1e6

    @pytest.mark.parametrize(("tokens", "cached"), [(1, 0), (7, 0), (1, 12), (100, 1000)])
    def test_seconds_are_those_of_each_token(self, tokens: int, cached: int) -> None:
        """Token by token: its own, and one for each that it reads, where it counts as half of itself."""
        slow = 10.0 + sum(2.0 + 1.0 * (at + 0.5) for at in range(cached, cached + tokens))
        assert MODEL.seconds(tokens, cached) == pytest.approx(slow)


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """A prompt of 13 tokens comes twice, half an hour apart; the second time 12 of them are reused."""
    config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=8)
    clock = iter(range(1_790_000_000 * 10**9, 2**62, 1800 * 10**9))
    own = Substitutes(wall_ns=lambda: next(clock))
    with KVCacheManager(config, log=tmp_path / "log", substitutes=own) as manager:
        for name in ("first", "second"):
            manager.add_sequence(name, list(range(13)))
            manager.store_context_blocks(name, 13)
            manager.flush()
    return tmp_path / "log"


class TestAudit:
    """What the prefills of a log take."""

    def test_by_hand(self, twice: Path) -> None:
        """First 10 + 2·13 + 13²/2 = 120.5 seconds, then 10 + 2 + 12.5 = 24.5; 12 tokens saved are 24 + 144/2 = 96."""
        audit, seconds = audited(twice)
        assert list(seconds.each) == [120.5, 24.5]
        assert seconds.saved == 96 == seconds.by_reason[Reason.PRIMARY]
        assert (audit.reused, seconds.evicted, seconds.lost) == (12, 0, 0)
        cost = seconds.cost(Pricing(MODEL, gpus=2, price=3.0), hours=0.5)
        assert (cost.mean_seconds, cost.p50_seconds) == (72.5, 72.5)
        assert cost.p95_seconds == pytest.approx(24.5 + 0.95 * 96)
        assert cost.gpu_hours == pytest.approx(145 * 2 / 3600)
        assert cost.saved_gpu_hours == pytest.approx(96 * 2 / 3600)
        assert cost.cost_per_hour == pytest.approx(145 * 2 / 3600 * 3 / 0.5)
        assert cost.saved_per_hour == pytest.approx(96 * 2 / 3600 * 3 / 0.5)

    def test_reasons_are_those_of_each_token(self, log: Path) -> None:
        """Of a run with both levels and blocks copied in part: the parts of each prompt, token by token."""
        slow = TokenByToken()
        audit, seconds = audited(log, slow)
        assert audit.reasons[Reason.PARTIAL]
        assert audit.reasons[Reason.SECONDARY]
        assert seconds.by_reason.tolist() == pytest.approx(slow.by_reason.tolist())
        assert list(seconds.each) == pytest.approx(slow.each)

    def test_what_is_loaded_is_not_computed_unless_it_does_not_come(self, tmp_path: Path) -> None:
        """8 of 13 tokens are loaded from outside; of another prompt 8 were to be, of which the last 4 do not come."""
        config = KVCacheConfig(max_sequence_length=16, tokens_per_block=4, primary_blocks=16)
        with Recorder(config, engine="an engine", log=tmp_path / "log") as recorder:
            for name, first in (("loaded", 100), ("failed", 200)):
                recorder.admitted(name, list(range(first, first + 13)), reused=[], external=8)
                recorder.allocated(name, list(range(4)) if name == "loaded" else list(range(4, 8)))
                recorder.flush()
            recorder.not_loaded("failed", 4)
            recorder.flush()
        _, seconds = audited(tmp_path / "log")
        # Tokens 8 to 12: 2·5 + (13² − 8²)/2 = 62.5; those from 4 to 7: 2·4 + (8² − 4²)/2 = 32.
        assert list(seconds.each) == [72.5, 104.5]
        assert seconds.not_loaded == 32
        assert seconds.by_reason[Reason.EXTERNAL] == 2 * (2 * 8 + 64 / 2)

    def test_nothing_costs_nothing(self) -> None:
        """No requests, no time: no means, and no money by the hour."""
        cost = Pricing(MODEL, price=1.0).of_prompts([], [], None)
        assert (cost.mean_seconds, cost.p95_seconds, cost.gpu_hours) == (None, None, 0)
        assert (cost.cost_per_hour, cost.saved_per_hour) == (None, None)

    def test_prompts_that_come_again_are_no_requests(self) -> None:
        """They take GPU-hours, and no part in the means."""
        cost = Pricing(MODEL).of_prompts([13, 13], [0, 12], 1.0, again=[13, 12])
        assert cost.mean_seconds == 72.5
        assert cost.gpu_hours == pytest.approx((145 + 24.5) / 3600)
        assert cost.saved_gpu_hours == pytest.approx(96 / 3600)


class TokenByToken(HistoryListener):
    """The same sums the slow way, from what `explain` tells of each request."""

    def __init__(self) -> None:
        self.by_reason = np.zeros(len(Reason))
        self.each: list[float] = []

    def admitted(self, history: HistoryFold, admission: ExplainedAdmission) -> None:
        """Go through the prompt."""
        total = MODEL.start
        for first, stop, reason, _ in admission.spans():
            for at in range(first, stop):
                self.by_reason[reason] += MODEL.per_token + MODEL.per_read * (at + 0.5)
                total += (MODEL.per_token + MODEL.per_read * (at + 0.5)) * reason.is_computed
        self.each.append(total)


def measured(
    model: Callable[[int, int], float], noise: float = 0.0, number: int = 60, seed: int = 5
) -> list[PrefillSample]:
    chance = random.Random(seed)
    pairs = [(chance.randrange(1, 20_000), chance.randrange(50_000)) for _ in range(number)]
    return [
        PrefillSample(model(n, k) * chance.uniform(1 - noise, 1 + noise), n, n * (k + n / 2))
        for n, k in pairs
    ]


class TestFit:
    """Formulas out of measurements."""

    def test_a_formula_is_found_again(self, tmp_path: Path) -> None:
        """From a table of what it says, to the last digits."""
        pairs = [(n, k) for n in (1, 100, 5_000) for k in (0, 40_000)]
        rows = [f"{k},x,{n},{REAL.seconds(n, k)!r}" for n, k in pairs]
        (tmp_path / "measured.csv").write_text("cached,note,tokens,seconds\n" + "\n".join(rows))
        found = fit(read_samples(tmp_path / "measured.csv"), "it")
        assert (found.model.start, found.model.per_token, found.model.per_read) == pytest.approx(
            (0.004, 6e-5, 2e-10)
        )
        assert found.rms_seconds < 1e-9
        assert (found.samples, found.per_decoding) == (6, 0)

    def test_no_number_is_below_0(self) -> None:
        """A concave curve has a c below 0 if that may be; of those that may not, none nearby has a smaller error."""
        samples = measured(lambda n, k: 0.05 * math.sqrt(n), number=200)
        found = fit(samples, "it")
        numbers = np.array([found.model.start, found.model.per_token, found.model.per_read])
        assert numbers.min() >= 0
        columns = np.array([(1, each.tokens, each.reads) for each in samples], float)
        seconds = np.array([each.seconds for each in samples])
        free = np.linalg.lstsq(columns, seconds, rcond=None)[0]
        assert free.min() < 0
        error = np.square(columns @ numbers - seconds).sum()
        assert error == pytest.approx(len(samples) * found.rms_seconds**2)
        steps = np.array([1e-3, 1e-8, 1e-13])
        for other in np.random.default_rng(5).normal(size=(300, 3)) * steps + numbers:
            assert np.square(columns @ np.maximum(other, 0) - seconds).sum() >= error * (1 - 1e-9)

    def test_its_error_is_reported(self) -> None:
        """Of times that are off by up to a tenth, half by less than a twentieth."""
        found = fit(measured(REAL.seconds, noise=0.1, number=2000), "it")
        assert found.median_part == pytest.approx(0.05, rel=0.15)
        assert found.model.per_token == pytest.approx(6e-5, rel=0.1)

    @pytest.mark.parametrize(
        ("samples", "said"),
        [
            ([], "has 0 prefills, too similar to fit"),
            ([PrefillSample(1.0, 5, 12.5)] * 9, "has 9 prefills, too similar to fit"),
            (measured(lambda n, k: 0.02), "do not fit the computed tokens"),
            (measured(lambda n, k: (n % 7) ** 4 + 1e-6), "do not fit the computed tokens"),
        ],
    )
    def test_what_says_nothing_is_refused(self, samples: list[PrefillSample], said: str) -> None:
        """Too few, all alike, always as long, or at random."""
        with pytest.raises(UsageError, match=said):
            fit(samples, "it")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("tokens,seconds\n1,2", "has no column cached"),
            ("", "has no column tokens"),
            ("tokens,cached,seconds\n1,0,1\n1,0,0", "line 3: write numbers"),
            ("tokens,cached,seconds\n1,0", "line 2: write numbers"),
            ("tokens,cached,seconds\n1,-1,2", "line 2: write numbers"),
            ("tokens,cached,seconds\nx,0,2", "line 2: write numbers"),
            (
                "tokens,cached,seconds\n1,0,1e300",
                "line 2: write numbers: .* seconds from 1e-09 to 1,000,000$",
            ),
            ("tokens,cached,seconds\n1,0,1e-300", "line 2: write numbers"),
            (
                "tokens,cached,seconds\n1,0,1\n1,0," + "1" * 200_000,
                "csv, line 3: not valid CSV: field larger",
            ),
            ("tokens," + "x" * 200_000, "csv, line 1: not valid CSV: field larger"),
        ],
    )
    def test_a_table_that_is_none(self, tmp_path: Path, text: str, said: str) -> None:
        """Its line is named."""
        (tmp_path / "measured.csv").write_text(text)
        with pytest.raises(UsageError, match=said):
            read_samples(tmp_path / "measured.csv")

    @pytest.mark.parametrize(
        "text", ["tokens,cached,seconds\n1,0,2\n".encode("utf-16"), b"tokens,cached,seconds\n1,0,\xff\n"]
    )
    def test_a_table_in_another_encoding(self, tmp_path: Path, text: bytes) -> None:
        """As some programs export it."""
        (tmp_path / "measured.csv").write_bytes(text)
        with pytest.raises(UsageError, match=r"measured\.csv is not text in UTF-8: save it"):
            read_samples(tmp_path / "measured.csv")


def engine_log(place: Path, chunk: int) -> None:
    """An engine whose steps take what the formula says of their chunks, and 1 ms for each request that decodes.

    It idles for a minute whenever nothing runs.
    """
    config = KVCacheConfig(max_sequence_length=4096, tokens_per_block=16, primary_blocks=2048)
    clock, chance = [1_790_000_000.0], random.Random(7)
    own = Substitutes(wall_ns=lambda: int(clock[0] * 1e9))
    with KVCacheManager(config, log=place, substitutes=own) as manager:
        running: dict[int, list[int]] = {}
        for number in range(120):
            if not running:
                clock[0] += 60
            for request in range(number * 3, number * 3 + chance.randrange(3)):
                prompt = [request % 4] * 512 + [request] * chance.randrange(16, 3000)
                admitted = manager.add_sequence(request, prompt)
                running[request] = [admitted.reused_tokens, len(prompt), 3]
            took, sampled = 0.004, []
            for request, (computed, length, _) in running.items():
                if computed < length:
                    stop = min(length, computed + chunk)
                    took += REAL.seconds(stop - computed, computed) - REAL.start
                    manager.store_context_blocks(request, stop)
                    running[request][0] = stop
                else:
                    took += 0.001
                if running[request][0] == length:
                    sampled.append(request)
            manager.add_tokens(sampled, [9] * len(sampled))
            for request in sampled:
                running[request][2] -= 1
                if not running[request][2]:
                    manager.remove_sequence(request)
                    del running[request]
            clock[0] += took
            manager.flush()


@pytest.mark.parametrize("chunk", [10_000, 256])
def test_the_steps_of_a_log_report_the_formula(tmp_path: Path, chunk: int) -> None:
    """Whole prompts or chunks, others that decode, and pauses, which are left out."""
    engine_log(tmp_path / "log", chunk)
    samples = logged_samples(tmp_path / "log")
    found = fit(samples, "it")
    assert (found.model.start, found.model.per_token, found.model.per_read) == pytest.approx(
        (0.004, 6e-5, 2e-10), rel=1e-3
    )
    assert found.per_decoding == pytest.approx(0.001, rel=1e-3)
    assert max(each.seconds for each in samples) < 30


def test_a_simulated_log_is_refused(log: Path) -> None:
    """Its steps last 20 ms, or until the next request comes."""
    with pytest.raises(UsageError, match="do not fit the computed tokens"):
        fit(logged_samples(log), "it")
