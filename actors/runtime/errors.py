"""What can go wrong between two actors."""

__all__ = [
    "ActorDied",
    "AskTimeout",
    "ChildCrash",
    "HandlerCancelled",
    "Hung",
    "MailboxFull",
    "MessageTooLarge",
    "RequestError",
    "UnknownMessage",
    "first_cause",
]


class RequestError(Exception):
    """This request is bad: the error goes to the asker, the actor lives on and nothing counts towards its restarts.

    Derive from it for errors of a request's own making. Arguments and attributes that msgpack can carry survive the
    way out of a child process; the class is found again among those the parent has imported.
    """


class HandlerCancelled(RequestError):
    """A handler ended with a cancellation that nobody asked the actor for; the actor lives on."""


class Hung(Exception):
    """The actor made no progress for so long that it was ended."""


class MessageTooLarge(RequestError):
    """A message or a reply is larger than the frame limit of the link to a child process."""


class ActorDied(Exception):
    """The actor died while it had the message, or has stopped for good. `cause` is None after an orderly stop."""

    def __init__(self, name: str, cause: BaseException | None = None) -> None:
        super().__init__(name, cause)
        self.name = name
        self.cause = cause
        self.__cause__ = cause

    def __str__(self) -> str:
        if self.cause is None:
            return f"actor {self.name!r} has stopped"
        return f"actor {self.name!r} died: {type(self.cause).__name__}: {self.cause}"


class AskTimeout(TimeoutError):
    """No reply within the asker's deadline. The message may have been handled; a late reply is dropped."""

    def __init__(self, name: str, message: str, timeout: float) -> None:
        super().__init__(name, message, timeout)
        self.name = name
        self.message = message
        self.timeout = timeout

    def __str__(self) -> str:
        return f"actor {self.name!r} did not answer {self.message} within {self.timeout:g} s"


class MailboxFull(Exception):
    """`offer` found the lane full. Merge, drop or use `tell`, which waits."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        self.name = name
        self.capacity = capacity

    def __str__(self) -> str:
        return f"the mailbox of actor {self.name!r} is full ({self.capacity} messages); use tell to wait for room"


class UnknownMessage(TypeError):
    """The actor has no handler for this message type; it is refused at the sender."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name = name
        self.message = message

    def __str__(self) -> str:
        return f"actor {self.name!r} has no handler for {self.message}: add a method with @handles, or check the ref"


def first_cause(error: BaseException) -> BaseException:
    """What came before everything else that led to ``error``."""
    seen = {id(error)}
    while True:
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return error
        seen.add(id(earlier))
        error = earlier


class ChildCrash(Exception):
    """The cause of death of an actor in a child process, as told by the child or by its exit status."""

    def __init__(self, reason: str, detail: str = "", returncode: int | None = None) -> None:
        super().__init__(reason, detail, returncode)
        self.reason = reason
        self.detail = detail
        self.returncode = returncode

    def __str__(self) -> str:
        return f"{self.reason}\n{self.detail}" if self.detail else self.reason

    def __repr__(self) -> str:
        """Without the detail, a traceback: for the lines of logs that name a cause in passing."""
        return f"ChildCrash({self.reason!r})"
