"""What a worker that wants to join asks the router for, at the public address."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from pdmesh.router.config import RouterConfig
from pdmesh.wire.control import JoinInfo, JoinRequest, join_proof
from pdmesh.wire.errors import InvalidRequest, Unavailable
from pdmesh.wire.hashes import PageFormat
from pdmesh.wire.rpc import Method
from pdmesh.wire.secret import read_secret


def join_method(config: RouterConfig, formats: Callable[[], list[PageFormat]]) -> Method:
    """``JoinInfo`` of service ``router``: answered only to who proves to have the secret, since a
    store's URL may hold a password.

    Args:
        formats: those of the workers that are ready now.
    """

    secret = read_secret(config.secret_file)

    async def join_info(request: JoinRequest) -> JoinInfo:
        if not hmac.compare_digest(request.proof, join_proof(secret, request.nonce)):
            raise InvalidRequest("the secret file is not this mesh's; copy its secret.key")
        known = formats()
        if not known:
            raise Unavailable("no worker is ready that says how pages look here; try again later")
        page_format = known[0]
        return JoinInfo(
            mesh=config.mesh,
            redis_url=config.redis_url,
            model_name=config.model_name,
            dtype=page_format.dtype,
            arithmetic=page_format.arithmetic,
            page_size=page_format.page_size,
            mtp=page_format.mtp_layers > 0,
            lease_ttl_s=config.lease_ttl_s,
            random=config.random,
        )

    return Method("JoinInfo", JoinRequest, unary=join_info)
