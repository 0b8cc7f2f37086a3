"""How a request to an engine can fail below HTTP's meaning, told apart by what may be done about it."""


class HttpError(Exception):
    """A request to an engine failed below HTTP's meaning."""


class NotConnected(HttpError):
    """No connection came about, so the request never left: safe to send anywhere."""


class Crowded(NotConnected):
    """As many connections are open as this pool may have."""


class Stale(HttpError):
    """A kept connection closed just after the request was written, with no byte back: most likely idle time ran out."""


class Broken(HttpError):
    """The connection failed when the engine may have acted on the request."""


class TooLate(Broken):
    """The engine was silent for longer than it may be."""


class Nonsense(HttpError):
    """What came back is not the HTTP/1.1 that was asked for."""
