"""Policies: which prefill and which decode worker serve a request, by name.

``make_policy`` gives one; ``Policy.choose`` is all that a router calls. A policy may remember what
it chose, and nothing else: time and randomness are handed in, so the same calls give the same
choices. What a policy may choose from is not its business: ``pdmesh.router.policy.usable`` says.
"""

from __future__ import annotations

from collections.abc import Callable

from pdmesh.router.policies.base import Policy
from pdmesh.router.policies.costs import Costs
from pdmesh.router.policies.plain import (
    BoundedLoad,
    LeastLoad,
    LongestPrefix,
    MinTtft,
    Random,
    RoundRobin,
    SessionAffinity,
    Tokens,
)
from pdmesh.router.policies.priced import Priced
from pdmesh.wire.errors import ConfigError

_MAKERS: dict[str, Callable[[Costs], Policy]] = {
    "tokens": Tokens,
    "priced": Priced,
    "min_ttft": MinTtft,
    "longest_prefix": LongestPrefix,
    "bounded_load": BoundedLoad,
    "session_affinity": SessionAffinity,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
    "random": Random,
}
POLICY_NAMES = tuple(_MAKERS)
DEFAULT_POLICY = "priced"


def make_policy(name: str, costs: Costs | None = None) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise ConfigError(f"no policy {name!r}; there are: {', '.join(POLICY_NAMES)}")
    return maker(costs or Costs())
