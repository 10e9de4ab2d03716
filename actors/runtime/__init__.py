"""An actor runtime for asyncio: typed messages, bounded mailboxes, supervision, and actors in child processes."""

from actors.runtime.actor import Actor, Answered, Deferred, Later, handles, handles_in_thread
from actors.runtime.blank_process import BlankProcess
from actors.runtime.clock import Clock, SystemClock
from actors.runtime.context import ActorContext, Terminated
from actors.runtime.errors import (
    ActorDied,
    AskTimeout,
    ChildCrash,
    HandlerCancelled,
    Hung,
    MailboxFull,
    MessageTooLarge,
    RequestError,
    UnknownMessage,
)
from actors.runtime.events import ActorStatus, Event, EventKind, Observer
from actors.runtime.failure import Failure
from actors.runtime.message import Lane, Message, current_actor, current_traceparent
from actors.runtime.ref import ActorRef
from actors.runtime.supervisor import Backoff, Strategy, Supervision
from actors.runtime.system import ActorSystem

__all__ = [
    "Actor",
    "ActorContext",
    "ActorDied",
    "ActorRef",
    "ActorStatus",
    "ActorSystem",
    "Answered",
    "AskTimeout",
    "Backoff",
    "BlankProcess",
    "ChildCrash",
    "Clock",
    "Deferred",
    "Event",
    "EventKind",
    "Failure",
    "HandlerCancelled",
    "Hung",
    "Lane",
    "Later",
    "MailboxFull",
    "Message",
    "MessageTooLarge",
    "Observer",
    "RequestError",
    "Strategy",
    "Supervision",
    "SystemClock",
    "Terminated",
    "UnknownMessage",
    "current_actor",
    "current_traceparent",
    "handles",
    "handles_in_thread",
]
