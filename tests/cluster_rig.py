"""Real clusters whose slots move."""

from __future__ import annotations

from free_ports import free_port
from store_rig import PASSWORD, Server


def cluster(servers, count: int) -> list[Server]:
    """A Redis Cluster of so many primaries; the slots are shared evenly."""
    ports = [str(free_port()) for _ in range(count)]
    nodes = [
        servers(f"n{i}", cluster_enabled="yes", cluster_port=port) for i, port in enumerate(ports)
    ]
    for i, node in enumerate(nodes):
        low, high = 16_384 * i // count, 16_384 * (i + 1) // count - 1
        node.do("CLUSTER", "ADDSLOTSRANGE", low, high)
        node.do("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, ports[0])
    for node in nodes:
        node.wait(
            lambda n=node: (
                f"cluster_known_nodes:{count}" in str(n.do("CLUSTER", "INFO"))
                and "cluster_state:ok" in str(n.do("CLUSTER", "INFO"))
            ),
            "the cluster is one",
        )
    return nodes


def begin_move(slot: int, source: Server, target: Server) -> None:
    """From now on the slot is on its way."""
    here, there = (node.do("CLUSTER", "MYID").decode() for node in (source, target))
    target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", here)
    source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", there)


def move_keys(source: Server, target: Server, *keys: bytes | str) -> None:
    """What a resharding does with some keys of a slot."""
    source.do(*("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "AUTH", PASSWORD, "KEYS"), *keys)


def move_slot(slot: int, source: Server, target: Server) -> None:
    """What a resharding does with one slot."""
    begin_move(slot, source, target)
    end_move(slot, source, target)


def end_move(slot: int, source: Server, target: Server) -> None:
    """Moves the keys that are left; the slot is the target's then."""
    while keys := source.do("CLUSTER", "GETKEYSINSLOT", slot, 3):
        move_keys(source, target, *keys)
    there = target.do("CLUSTER", "MYID").decode()
    for node in (target, source):
        node.do("CLUSTER", "SETSLOT", slot, "NODE", there)
