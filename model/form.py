"""Which form of attention computes a prompt with fewer operations.

Of a token pair (query, key) MHA form costs 2 h (nope + rope + v) operations a layer and absorbed
form 2 h (2 rank + rope), h heads. Projecting latents up costs 2 rank h (nope + v): for every
token with a latent in MHA form, cached ones included, and the same for every query token in
absorbed form. So MHA form wins unless few tokens follow a long cached prefix.
"""

from pdmesh.model.batch import Form
from pdmesh.model.config import ModelConfig


def prefill_form(config: ModelConfig, cached_tokens: int, num_tokens: int) -> Form:
    """The form for a whole prompt, whatever chunks it is computed in.

    Args:
        config: heads and dims.
        cached_tokens: tokens at the front whose latents are there when the prompt starts.
        num_tokens: tokens of the prompt, the cached ones included.

    Returns:
        "mha" for a prompt with nothing cached; otherwise the form with fewer operations for its
        last num_tokens - cached_tokens tokens (at least one: a prompt that is wholly cached
        computes its last token again), "mha" where both are equal.
    """
    if cached_tokens <= 0:
        return "mha"
    cached = min(cached_tokens, num_tokens - 1)
    mha, absorbed = form_costs(config, cached, num_tokens - cached)
    return "mha" if mha <= absorbed else "absorbed"


def form_costs(config: ModelConfig, cached: int, new: int) -> tuple[int, int]:
    """Twice the operations a layer of attention and up-projection, (MHA form, absorbed form).

    The pairs are new * (cached + new / 2): twice of it is a whole number.
    """
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    pairs = new * (2 * cached + new)
    up = 2 * rank * heads * (nope + value)
    mha = 2 * heads * (nope + rope + value) * pairs + 2 * up * (cached + new)
    absorbed = 2 * heads * (2 * rank + rope) * pairs + 2 * up * new
    return mha, absorbed
