"""Actors in child processes.

    plan.py            ProcessPlan: what a child runs, with its limits
    incarnation.py     the parent's side of one run of such an actor
    child_process.py   ChildProcess: the process and its link; blank_process.py: one that waits for its actor
    launched.py        the interface of a launched process, on any host
    link.py            frames over a socket; frames.py: which frames there are; wire.py: their contents
    thread.py          the thread in which a child's handlers run; child_log.py: its log records

The child's side is ``actors.runtime.child``.
"""
