"""How many interactive requests may be under way: the others are told to come back."""

from actors.bulk.errors import ApiError

_RETRY_S = 2


class Seats:
    """Counts requests in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0
        self.closing = False  # the endpoint stops: nobody else gets one

    def take(self) -> "Seat":
        """Raises ApiError 429 where all are taken, 503 where there will be no more."""
        if self.closing:
            raise ApiError(503, "The endpoint stops.", "stopping", retry_after=_RETRY_S)
        if self.taken >= self._limit:
            problem = f"{self._limit} requests are in flight; come back, or make it a batch"
            raise ApiError(429, problem, "rate_limit_exceeded", retry_after=_RETRY_S)
        return Seat(self)


class Seat:
    """Held by a request until `leave`, or until it is forgotten: a stream may never be read."""

    def __init__(self, seats: Seats) -> None:
        self._seats: Seats | None = seats
        seats.taken += 1

    def leave(self) -> None:
        if self._seats is not None:
            self._seats.taken -= 1
            self._seats = None

    __del__ = leave
