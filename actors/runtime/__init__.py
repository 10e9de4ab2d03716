"""An actor runtime for asyncio: typed messages, bounded mailboxes, supervision, and actors in child processes."""

from actors.runtime.core.actor import Actor, Deferred, EarlyReply, Later, handles, handles_in_thread
from actors.runtime.core.clock import Clock, SystemClock
from actors.runtime.core.context import ActorContext, Terminated
from actors.runtime.core.errors import (
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
from actors.runtime.core.events import ActorStatus, Event, EventKind, Observer
from actors.runtime.core.failure import Failure
from actors.runtime.core.message import Lane, Message, current_actor, current_traceparent
from actors.runtime.core.ref import ActorRef
from actors.runtime.core.supervisor import Backoff, Strategy, Supervision
from actors.runtime.process.blank_process import BlankProcess, LocalProcess, first_bytes
from actors.runtime.process.launched import LaunchedProcess, Launcher
from actors.runtime.process.link import Link
from actors.runtime.system import ActorSystem

__all__ = [
    "Actor",
    "ActorContext",
    "ActorDied",
    "ActorRef",
    "ActorStatus",
    "ActorSystem",
    "AskTimeout",
    "Backoff",
    "BlankProcess",
    "ChildCrash",
    "Clock",
    "Deferred",
    "EarlyReply",
    "Event",
    "EventKind",
    "Failure",
    "HandlerCancelled",
    "Hung",
    "Lane",
    "Later",
    "LaunchedProcess",
    "Launcher",
    "Link",
    "LocalProcess",
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
    "first_bytes",
    "handles",
    "handles_in_thread",
]
