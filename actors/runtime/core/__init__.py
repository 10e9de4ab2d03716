"""Actors in one event loop.

actor.py         Actor, ``handles``        message.py, ref.py: messages and addresses
cell.py          Cell: mailbox and state of an actor across its incarnations
incarnation.py   one run of an actor       supervisor.py, failure.py: what follows a crash
mailbox.py       the bounded mailbox       context.py: an actor's view of the system
errors.py        errors between two actors
clock.py         real or virtual time      events.py, system_events.py, stacks.py: observation
"""
