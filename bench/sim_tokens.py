"""The admission policies alone, in one process and without the shared queue: what they are worth by themselves.

A token gate: one queue by deadline + ALPHA ms per prompt token, every request tested at arrival, at the head and at
dispatch by `policies.forecast` on an exact ledger, at most two prefill chunks outstanding per engine, the KV peak by
Past-Future's formula over all that is in flight. No tenants, no fairness. Signalbox should come close to it and adds
what it lacks.
"""

import bisect
import math

from bench.sim_signalbox import HEADROOM, Beliefs, Estimates
from bench.sim_site import Call, Outcome, Seen, Site
from policies.forecast import (
    NOTHING_AHEAD,
    Ahead,
    Demand,
    Due,
    Forecast,
    Load,
    Safety,
    first_token_test,
    forecast,
    pace_test,
)
from policies.kv import Deviations, KvSums, peak_tokens, rounded

ALPHA = 1.0  # ms per prompt token
WINDOW_CHUNKS = 2


class Ledger:
    """What one engine has in flight, by call, as the gateway that sent it knows."""

    def __init__(self, estimates: Estimates) -> None:
        self.calls: dict[int, Call] = {}
        self.outstanding = 0
        self._estimates = estimates

    def __repr__(self) -> str:
        return f"<Ledger {len(self.calls)} in flight, {self.outstanding} tokens without an answer>"

    def take(self, call: Call) -> None:
        self.calls[call.number] = call
        self.outstanding += call.prompt_tokens

    def first(self, call: Call) -> None:
        self.outstanding -= call.prompt_tokens

    def give_back(self, call: Call) -> None:
        del self.calls[call.number]
        if call.first_ms < 0:
            self.outstanding -= call.prompt_tokens

    def load(self) -> Load:
        shape, kv = self._estimates.shape, KvSums()
        decoding = contexts = 0
        remaining, tightest = 0.0, float("inf")
        for call in self.calls.values():
            outlook = self._estimates.outlook(call)
            peak = rounded(call.prompt_tokens + outlook.mean, shape.kv_block)
            kv = kv.plus(peak, outlook.variance, rounded(call.prompt_tokens + outlook.q90, shape.kv_block))
            if call.tenant.objective.tpot_ms:
                tightest = min(tightest, call.tenant.objective.tpot_ms / 1000)
            if call.first_ms >= 0:
                decoding += 1
                contexts += call.prompt_tokens + call.produced
                remaining += outlook.mean - call.produced
        usable = int(HEADROOM * shape.kv_tokens)
        places = int(usable * kv.requests / kv.mean_tokens) if kv.requests else shape.max_running
        return Load(
            chunk_tokens=shape.chunk_tokens,
            max_running=max(1, min(shape.max_running, places)),
            kv_usable_tokens=usable,
            kv_block=shape.kv_block,
            outstanding_tokens=self.outstanding,
            prefilling=len(self.calls) - decoding,
            running=decoding,
            kv_tokens=contexts,
            remaining_tokens=remaining,
            tightest_tpot_s=tightest,
            kv=kv,
        )

    def kv_peak(self, call: Call, z: float) -> float:
        """The most tokens that all in flight and one more are expected to hold at once, and `z` deviations."""
        variance, running = 0.0, []
        for one in (*self.calls.values(), call):
            outlook = self._estimates.outlook(one)
            running.append((one.prompt_tokens + one.produced, max(1.0, outlook.mean - one.produced)))
            variance += outlook.variance
        return peak_tokens(running, self._estimates.shape.kv_block) + z * math.sqrt(variance)


class TokenGate:
    """The policies on one queue. Learns as a gateway process does."""

    def __init__(self, site: Site, beliefs: Beliefs | None = None) -> None:
        self._site = site
        self._estimates = Estimates(site.engines[0].shape, len(site.engines), beliefs or Beliefs())
        self._ledgers = [Ledger(self._estimates) for _ in site.engines]
        self._safety = Safety()
        self._line: list[tuple[float, int, Call]] = []
        self._promised: dict[int, float] = {}

    def arrive(self, call: Call) -> None:
        verdict = self._estimates.impossible(call)
        if verdict is not None:
            self._site.refuse(call, verdict.reason or "deadline_impossible")
            return
        entry = (call.deadline_ms + ALPHA * call.prompt_tokens, call.number, call)
        place = bisect.bisect(self._line, entry)
        engines = len(self._ledgers)
        before = self._line[:place]
        ahead = Ahead(sum(one[2].prompt_tokens for one in before) / engines, len(before) / engines)
        if not any(self._on_time(engine, self._ledgers[engine].load(), call, ahead) for engine in range(engines)):
            self._site.refuse(call, "deadline_unreachable")
            return
        self._line.insert(place, entry)

    def stepped(self, seen: Seen, calls: list[Call]) -> None:
        self._estimates.learn(seen, self._site.now_ms)
        ledger = self._ledgers[seen.engine]
        for call in calls:
            if call.produced == 1:
                ledger.first(call)
                promised_s = self._promised.pop(call.number)
                self._safety.observe(promised_s, (call.first_ms - call.sent_ms) / 1000)
            if call.outcome is Outcome.DONE:
                ledger.give_back(call)
                self._estimates.ended(call)

    def left(self, call: Call) -> None:
        if call.engine < 0:
            self._line = [entry for entry in self._line if entry[2] is not call]
            return
        self._ledgers[call.engine].give_back(call)
        self._promised.pop(call.number, None)
        self._estimates.ended(call)

    def act(self) -> None:
        while self._line and self._try(self._line[0][2]):
            del self._line[0]

    def close(self) -> None:
        pass

    def _try(self, call: Call) -> bool:
        """Send or refuse the head; False when it has to wait."""
        waits = False
        for engine in sorted(range(len(self._ledgers)), key=lambda i: self._ledgers[i].outstanding):
            ledger = self._ledgers[engine]
            load, demand = ledger.load(), self._demand(call)
            if self._on_time(engine, load, call, NOTHING_AHEAD):
                waits = True
                seen = self._forecast(engine, load, demand, NOTHING_AHEAD)
                room = ledger.outstanding < WINDOW_CHUNKS * load.chunk_tokens
                fits = ledger.kv_peak(call, Deviations.START) <= load.kv_usable_tokens
                if room and fits and pace_test(seen, load, demand).ok:
                    self._promised[call.number] = seen.first_token_s
                    ledger.take(call)
                    self._site.start(call, engine)
                    return True
        if not waits:
            self._site.refuse(call, "deadline_unreachable")
        return not waits

    def _on_time(self, engine: int, load: Load, call: Call, ahead: Ahead) -> bool:
        demand = self._demand(call)
        seen = self._forecast(engine, load, demand, ahead)
        return first_token_test(seen, load, demand, self._safety.factor).ok

    def _forecast(self, engine: int, load: Load, demand: Demand, ahead: Ahead) -> Forecast:
        return forecast(self._estimates.models[engine], load, demand, ahead)

    def _demand(self, call: Call) -> Demand:
        aim = call.tenant.objective
        left_s = (call.deadline_ms - self._site.now_ms) / 1000
        tpot_s = aim.tpot_ms / 1000 if aim.tpot_ms else float("inf")
        prompt = self._estimates.prompt_tokens(call)
        return Demand(prompt, prompt, self._estimates.outlook(call), Due(left_s, tpot_s))
