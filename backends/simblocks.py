"""The KV cache of the simulated engine, in blocks. Prompts with prefix names share the blocks they have in common."""

from collections import OrderedDict


class Held:
    """The blocks of one sequence: `own` ones, and `shared` ones by name, of which `found` were there before it.

    All of them together hold `room` tokens.
    """

    __slots__ = ("found", "own", "room", "shared")

    def __init__(self, own: int, shared: list[int], room: int) -> None:
        self.room = room
        self.own = own
        self.shared = shared
        self.found = len(shared)


class Blocks:
    """A count of blocks in use. `kept` blocks have no user but keep their content until the room is needed."""

    def __init__(self, total: int, size: int) -> None:
        if total < 1 or size < 1:
            raise ValueError("the KV cache must hold at least one block of at least one token")
        self.total, self.size = total, size
        self.used = 0
        self._users: dict[int, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Blocks {self.used} of {self.total} used, {len(self._kept)} kept>"

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, tokens: int, prefix: tuple[int, ...] = ()) -> Held | None:
        """Blocks for so many tokens, those of a known prefix shared; None when there is no room for all of them."""
        found = []
        for name in prefix:
            if name not in self._users and name not in self._kept:
                break
            found.append(name)
        own = self.needed(tokens) - len(found)
        woken = sum(1 for name in found if name in self._kept)
        if self.used + own + woken > self.total:
            return None
        for name in found:
            self._kept.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1
        self.used += own + woken
        self._evict()
        return Held(own, found, (own + len(found)) * self.size)

    def grow(self, held: Held, tokens: int) -> bool:
        """Whether `held` now has room for so many tokens; takes one more block at need."""
        if held.room >= tokens:
            return True
        if self.used >= self.total:
            return False
        held.own += 1
        held.room += self.size
        self.used += 1
        self._evict()
        return True

    def share(self, held: Held, prefix: tuple[int, ...]) -> None:
        """The prompt is computed: its blocks can serve others. Those that somebody else shares already stay its own."""
        for name in prefix[len(held.shared) :]:
            if name in self._users or name in self._kept or held.own == 0:
                return
            self._users[name] = 1
            held.shared.append(name)
            held.own -= 1

    def give_back(self, held: Held) -> None:
        self.used -= held.own
        held.own = 0
        for name in reversed(held.shared):
            self._users[name] -= 1
            if self._users[name] == 0:
                del self._users[name]
                self._kept[name] = None
                self.used -= 1
        held.shared = []

    def _evict(self) -> None:
        """Forget kept blocks, the longest unused first, until used and kept ones fit."""
        while self.used + len(self._kept) > self.total:
            self._kept.popitem(last=False)
