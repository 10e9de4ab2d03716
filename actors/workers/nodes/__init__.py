"""Several machines that run one model: node 0 plans, an agent on each other node starts its workers.

    hub.py         Hub, on node 0: admits agents and launches workers on their nodes
    agent.py       NodeAgent, on another node: starts and kills worker processes as the hub asks
    handshake.py   the mutual proof of the secret, on every connection
    messages.py    what hub and agent send each other

A worker's two links are TCP connections between its own process and node 0: nothing relays them. Only the handshake
protects a connection; nothing is encrypted, so the network between the nodes must be private.
"""
