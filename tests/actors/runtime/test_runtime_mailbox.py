"""In which order a mailbox gives out what it holds."""

from actors.runtime import Message
from actors.runtime.core.mailbox import Mailbox
from actors.runtime.core.message import Envelope, Lane


class AnyProtocol: ...


class Data(Message[AnyProtocol, None], frozen=True):
    text: str


class Control(Message[AnyProtocol, None], frozen=True):
    text: str
    lane = Lane.CONTROL


def put(mailbox: Mailbox, *texts: str, replies: int = 0) -> None:
    for text in texts:
        mailbox.offer(Envelope(Data(text), None, 0.0, None, None))
    for _ in range(replies):
        mailbox.put_reply(Envelope(Data("reply"), None, 0.0, None, None))


def take(mailbox: Mailbox) -> str:
    envelope = mailbox.take()
    return "" if envelope is None else envelope.message.text


def test_replies_go_before_data_and_control_before_both() -> None:
    mailbox = Mailbox("any", 8, 8)
    put(mailbox, "a", "b", replies=1)
    mailbox.offer(Envelope(Control("control"), None, 0.0, None, None))
    assert [take(mailbox) for _ in range(5)] == ["control", "reply", "a", "b", ""]
    put(mailbox, *"cdefghij")
    assert [take(mailbox) for _ in range(8)] == [*"cdefghij"]
    put(mailbox, "k", replies=1)
    assert take(mailbox) == "reply"


def test_replies_that_never_end_keep_no_data_waiting() -> None:
    mailbox = Mailbox("any", 32, 8)
    put(mailbox, *"abcdefghijkl", replies=2)
    taken = []
    for _ in range(18):
        taken.append(take(mailbox))
        put(mailbox, replies=taken[-1] == "reply")
    assert taken == ["reply", *"abcdefgh", "reply", *"ijkl", "reply", "reply", "reply", "reply"]
