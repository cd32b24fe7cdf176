"""The page format that a loaded model implies."""

from __future__ import annotations

from pdmesh.kernels.quantised import LATENT_BYTES
from pdmesh.model.config import ModelConfig
from pdmesh.wire.hashes import Arithmetic, PageFormat, Precision
from pdmesh.wire.ids import PAGE_SIZE

PLAIN_LAYOUT, PACKED_LAYOUT = 1, 2
"""`PageFormat.layout`. A reader of packed pages may take a latent's first scale for all of it, so
workers must never take pages of four different scales for these."""


def page_format(
    config: ModelConfig,
    model_name: str,
    weights: str,
    dtype: str,
    mtp: bool,
    page_size: int = PAGE_SIZE,
    arithmetic: Arithmetic = "fast",
    precision: Precision = "plain",
    packed: bool = False,
) -> PageFormat:
    """What two workers must agree on to exchange pages of this model.

    Args:
        config: the model's configuration.
        model_name: the name that clients use.
        weights: fingerprint of configuration and weights.
        dtype: "float32", "bfloat16" or "float16".
        mtp: whether MTP latents are kept in the pages.
        page_size: tokens a page.
        arithmetic: "fast" or "exact"; see `Arithmetic`.
        precision: "plain" or "fp8", what matrices are multiplied in.
        packed: latents are kept in FP8, as `kernels.quantised.pack_latents` packs them.
    """
    mtp_layers = config.num_nextn_predict_layers if mtp else 0
    return PageFormat(
        model=model_name,
        weights=weights,
        dtype=dtype,
        page_size=page_size,
        num_layers=config.num_hidden_layers + mtp_layers,
        mtp_layers=mtp_layers,
        latent_width=LATENT_BYTES if packed else config.latent_width,
        layout=PACKED_LAYOUT if packed else PLAIN_LAYOUT,
        arithmetic=arithmetic,
        precision=precision,
        packed=packed,
    )
