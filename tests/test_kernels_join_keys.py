"""Keys of every head, in Triton's interpreter, beside the definition."""

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/test_gpu_small.py has the cases of a device", allow_module_level=True)

from pdmesh.kernels import latent_rows as definition  # noqa: E402
from pdmesh.kernels.triton import join_keys as fast  # noqa: E402


def case(rows, heads, nope, rope, dtype=torch.bfloat16):
    """Views of wider rows, as a projection and the pages give them."""
    generator = torch.Generator().manual_seed(rows + heads)
    up = torch.randn(rows, heads, nope + 24, generator=generator).to(dtype)
    latents = torch.randn(rows, 40 + rope, generator=generator).to(dtype)
    return up[..., :nope], latents[:, 40:]


@pytest.mark.parametrize(
    ("rows", "heads", "nope", "rope"),
    [(0, 4, 128, 64), (1, 1, 16, 8), (5, 33, 128, 64), (3, 64, 48, 24), (2, 6, 128, 64)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_key_is_its_heads_own_part_and_then_the_part_of_all(rows, heads, nope, rope, dtype):
    own, shared = case(rows, heads, nope, rope, dtype)
    keys = fast.join_keys(own, shared)
    assert keys.is_contiguous()
    assert torch.equal(keys, definition.join_keys(own, shared))
    assert torch.equal(keys[..., :nope], own)
    assert torch.equal(keys[..., nope:], shared[:, None].expand(-1, heads, -1))


def test_parts_that_do_not_belong_together_are_refused():
    own, shared = case(3, 2, 16, 8)
    for nope, rotated in (
        (own, shared[:2]),
        (own, shared.float()),
        (own.transpose(1, 2), shared),
        (own, shared[:, :1].expand(-1, 8)),
    ):
        with pytest.raises(ValueError, match="nope|consecutive"):
            fast.join_keys(nope, rotated)
