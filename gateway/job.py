"""What a request asks for, and how it is told that it will not get it."""

from msgspec import Struct

from backends.features import Feature
from backends.protocol import BackendBusy, BackendLost, Prompt, Refused
from gateway.pool import Pool
from gateway.tenants import Tenant
from policies.reasons import Reason, Refusal
from policies.types import ServiceClass

NO_DEADLINE_MS = 1_000_000_000


class Job(Struct, frozen=True):
    """What is asked: by whom, in which class, by when. Times are seconds of the loop's clock; 0 is no deadline.

    `identity`, if any, is what it is known by when it comes again; `again`: its client says that it does.
    """

    tenant: Tenant
    service: ServiceClass
    pool: Pool
    prompt: Prompt
    wanted: dict[Feature, str]
    first_by: float = 0.0
    end_by: float = 0.0
    tpot_ms: int = 0
    identity: str = ""
    again: bool = False


class Failed(Exception):
    """The request will get no (further) answer; `refusal` says why. `body` is an engine's own words for it."""

    def __init__(self, refusal: Refusal, status: int = 0, body: bytes | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal, self.status, self.body = refusal, status, body


class Unheard(BackendLost):
    """The request has to go elsewhere, and the engine of this backend never heard of it."""


class WentDown(Unheard):
    """The backend went down while the request waited for it."""


class Unable(Unheard):
    """The backend does not do what the request asks for; the plan was another's. `refusal` is what it says."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def ms_until(by: float, at: float) -> int:
    """Milliseconds left until `by`, negative if it has passed; very many where there is no deadline."""
    return int((by - at) * 1000) if by else NO_DEADLINE_MS


def failure(error: Exception, alone: bool, wait_s: float) -> Failed:
    """A failure before the first chunk as an answer. `alone`: there was no other backend to go to."""
    none = alone or isinstance(error, BackendBusy)
    what = f"the engine failed before its first token: {error}"
    return Failed(Refusal(Reason.NO_BACKEND if none else Reason.ENGINE_ERROR, what, None, wait_s if none else 0.0))


def refusal_of(no: Refused) -> Refusal:
    """An engine's own no, by our reasons."""
    try:
        reason = Reason(no.code)
    except ValueError:
        reason = Reason.INVALID_REQUEST
    return Refusal(reason, no.message, no.param)
