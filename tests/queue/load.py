"""A load on several queues at once, and what must be true of it whatever happens to the store."""

import asyncio
from typing import Any

from gateway.queue.client import Queue, QueueRefusal
from policies.reasons import Reason
from tests.queue.conftest import ticket
from tests.queue.ledgers import check, tickets
from tests.queue.test_client import told, until

CLIENTS = 12


class Load:
    """Clients of each queue that ask, run for a millisecond, end, and ask again. `outcomes`: a word per request."""

    def __init__(self, *queues: Queue) -> None:
        self.queues = queues
        self.outcomes: list[str] = []
        self.asked = self.running = 0
        self._over = False
        self._tasks = [asyncio.ensure_future(self._client(queue)) for queue in queues for _ in range(CLIENTS)]

    async def goes_on(self, more: int = 200, limit_s: float = 20.0) -> None:
        """Until so many more requests have been served."""
        wanted = self.outcomes.count("done") + more
        await until(lambda: self.outcomes.count("done") >= wanted, limit_s)

    async def settle(self, server: Any) -> None:
        """Stop asking; every request has had one end, and the store's ledgers are zero."""
        self._over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), 20)
        assert self.running == 0
        assert len(self.outcomes) == self.asked
        assert set(self.outcomes) <= {"done", Reason.STORE_LOST}
        for queue in self.queues:
            await until(lambda q=queue: q.book.known == 0, 10)
            await told(queue)
        await until(lambda: tickets(server) == {}, 10)
        assert check(server) == {}

    async def _client(self, queue: Queue) -> None:
        while not self._over:
            self.asked += 1
            place = queue.submit(ticket(tenant=f"t{self.asked % 5}", waits_ms=30_000))
            try:
                await place.granted()
                self.running += 1
                await asyncio.sleep(0.001)
                self.running -= 1
                self.outcomes.append("done")
            except QueueRefusal as refusal:
                self.outcomes.append(refusal.refusal.reason)
                await asyncio.sleep(0.01)
            finally:
                place.end()
