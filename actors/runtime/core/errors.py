"""Errors between two actors."""

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
    """The request is invalid: the error goes to the caller, and the actor continues without a restart.

    Derive from it for errors that the request caused. A child process sends arguments and attributes that msgpack can
    encode; the parent restores the class if it has imported it.
    """


class HandlerCancelled(RequestError):
    """A handler was cancelled, but not by the runtime; the actor continues."""


class Hung(Exception):
    """The actor was ended because it made no progress for too long."""


class MessageTooLarge(RequestError):
    """A message or a reply is larger than the frame limit of the link to a child process."""


class ActorDied(Exception):
    """The actor died while it had the message, or has stopped permanently. ``cause`` is None after an orderly stop."""

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
    """No reply within the caller's deadline. The message may have been handled; a late reply is dropped."""

    def __init__(self, name: str, message: str, timeout: float) -> None:
        super().__init__(name, message, timeout)
        self.name = name
        self.message = message
        self.timeout = timeout

    def __str__(self) -> str:
        return f"actor {self.name!r} did not answer {self.message} within {self.timeout:g} s"


class MailboxFull(Exception):
    """``offer`` found the lane full. Merge, drop or use ``tell``, which waits."""

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        self.name = name
        self.capacity = capacity

    def __str__(self) -> str:
        return f"the mailbox of actor {self.name!r} is full ({self.capacity} messages); use tell to wait for room"


class UnknownMessage(TypeError):
    """The actor has no handler for this message type; raised at the sender."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(name, message)
        self.name = name
        self.message = message

    def __str__(self) -> str:
        return f"actor {self.name!r} has no handler for {self.message}: add a method with @handles, or check the ref"


def first_cause(error: BaseException) -> BaseException:
    """The innermost cause in the chain of ``error``."""
    seen = {id(error)}
    while True:
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return error
        seen.add(id(earlier))
        error = earlier


class ChildCrash(Exception):
    """The cause of death of an actor in a child process, as reported by the child or by its exit status."""

    def __init__(self, reason: str, detail: str = "", returncode: int | None = None) -> None:
        super().__init__(reason, detail, returncode)
        self.reason = reason
        self.detail = detail
        self.returncode = returncode

    def __str__(self) -> str:
        return f"{self.reason}\n{self.detail}" if self.detail else self.reason

    def __repr__(self) -> str:
        """The error without ``detail``, which is a traceback, for log lines that name a cause."""
        return f"ChildCrash({self.reason!r})"
