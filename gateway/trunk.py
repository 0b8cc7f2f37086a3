"""Everything a request needs, in one place, and the order in which it starts and ends."""

import asyncio
import logging
from collections.abc import Iterable

from gateway.config import Config, models
from gateway.keyring import Keyring
from gateway.pool import Member, Pool
from gateway.queue.client import Queue
from gateway.reaper import Reaper
from gateway.supervisor import Supervisor
from gateway.telemetry.audience import Audience
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.metrics_sampler import Sampler
from gateway.telemetry.metrics_sheet import Board
from gateway.telemetry.metrics_text import Scrape
from gateway.telemetry.start import Telemetry
from gateway.telemetry.watcher import Watchers
from gateway.tenants import Tenant, Tenants
from gateway.ticker import Ticker
from policies.reasons import Reason, Refusal
from policies.retry import RetryBudgets
from policies.types import ServiceClass

log = logging.getLogger(__name__)

GOING = Refusal(Reason.DRAINING, "the gateway is shutting down")


class Trunk:
    """The gateway process: configuration, tenants, pools, the shared queue, and what is running.

    Made anywhere; `start` and `aclose` belong to the event loop that serves.
    """

    def __init__(self, config: Config, board: Board | None = None) -> None:
        """`board` is where the gateway's processes count together; without one it is this process's alone."""
        self.config = config
        self.metrics = Metrics(board or Board(), config.metrics)
        self.tenants = Tenants(config)
        self.classes: dict[str, ServiceClass] = {one.name: one for one in config.classes}
        self.by_rank = sorted(config.classes, key=lambda one: one.rank)
        self.default_class = self.classes[config.default_class]
        self.reaper = Reaper()
        self.supervisor = Supervisor()
        self.pools: dict[str, Pool] = {one.model: Pool(one.model, one.backends, self.reaper) for one in config.pools}
        self.names = {name: self.pools[model] for name, model in models(config).items()}
        self.retries = RetryBudgets(config.retry)
        self.draining = False
        self.watchers = Watchers()
        self.watchers.add(self.metrics)
        self.telemetry = Telemetry(config)
        self.trace_sampler = self.telemetry.sampler
        self._keepers: list[asyncio.Task[None]] = []
        self.ticker: Ticker
        self.queue: Queue
        self.keyring: Keyring
        self.scrape: Scrape
        self.audience: Audience

    def __repr__(self) -> str:
        live = len(self.ticker) if hasattr(self, "ticker") else 0
        return (
            f"<Trunk {live} live, {', '.join(map(repr, self.pools.values()))}{', draining' if self.draining else ''}>"
        )

    @property
    def ready(self) -> bool:
        """Whether a request would find the store and, in every pool, at least one backend."""
        there = self.queue.joined and not (self.draining or self.queue.lost)
        return there and all(pool.ready for pool in self.pools.values())

    async def start(self) -> None:
        """Bring up the queue, then the backends side by side; returns while backends may still be coming up."""
        self.ticker = Ticker()
        self.queue = await Queue.connect(self.config.store, self.supervisor)
        self.queue.turns.turned = self.metrics.turned
        self.keyring = Keyring(self.queue.target, self.tenants)
        try:
            await self.keyring.start(self.supervisor)
        except BaseException:
            await self.queue.aclose()
            raise
        sampler = Sampler(self, self.metrics.board)
        self.scrape = Scrape(self, self.metrics.board, sampler)
        self.audience = Audience(self, self.scrape, sampler)
        self.supervisor.start("metrics", sampler.run())
        for pool in self.pools.values():
            pool.declare = self.queue.declare
            self.queue.declare(pool.share())
            for member in pool.members:
                name = f"backend {member.config.name} of {pool.model}"
                self._keepers.append(self.supervisor.start(name, pool.keep(member)))
        self.telemetry.start(self.watchers)

    async def aclose(self) -> None:
        """End what still runs, give every lease back, close the backends, then the queue."""
        self.draining = True
        self.audience.close()
        self.ticker.cut(GOING)
        await self.ticker.idle()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self.reaper.drain()
        self.watchers.close()
        await self.keyring.aclose()
        await self.queue.aclose()
        await self.supervisor.aclose()
        await self.telemetry.aclose()

    async def drain(self, limit_s: float) -> None:
        """Refuse new work; let what runs finish for at most `limit_s`, then cut it. Until then it may be watched."""
        self.draining = True
        log.info("draining: %d requests live, at most %.0f s", len(self.ticker), limit_s)
        try:
            async with asyncio.timeout(limit_s):
                await self.ticker.idle()
        except TimeoutError:
            log.warning("%d requests did not finish in time and are cut", len(self.ticker))
            self.ticker.cut(GOING)
            await self.ticker.idle()
        self.audience.close()

    def may_see(self, tenant: Tenant) -> Iterable[tuple[str, Pool]]:
        """The model names a tenant may ask for, aliases included, with their pools."""
        return ((name, pool) for name, pool in self.names.items() if tenant.may_use(pool.model))

    def class_of_rank(self, rank: int) -> ServiceClass:
        """The best class that is not above `rank`."""
        return next((one for one in self.by_rank if one.rank >= rank), self.by_rank[-1])

    def members(self) -> Iterable[Member]:
        return (member for pool in self.pools.values() for member in pool.members)
