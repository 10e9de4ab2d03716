"""Workers: child processes that run one rank of the model each.

worker.py          Worker, in the child          group.py: the workers of one model, started and replaced together
placement.py       the device of each worker     launchers/: how its process is started
early_workers.py   processes that import PyTorch while the server starts
nodes/             workers on other machines
watchdog.py        reports slow actors and ends those that hang
"""
