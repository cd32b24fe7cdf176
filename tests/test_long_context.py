"""A context of 131,072 tokens: 2,048 pages of 64, or 8,192 of 16."""

import copy
import functools

import pytest
import torch
from model_cases import TINY, equal, one_slice, tiny_model, tokens_of, yarn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from pdmesh.model.batch import Batch, SequenceSlice
from pdmesh.model.config import ModelConfig
from pdmesh.model.rope import rope_table

LENGTH = 131_072
LONG = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": LENGTH,
    "rope_scaling": yarn(32.0, 4096),
}


@functools.cache
def model():
    return tiny_model(31, **LONG)


@functools.cache
def sequence_latents():
    """[LENGTH, width]: normalised values and rotated ones, as a long prompt leaves them."""
    config = model().config
    generator = torch.Generator().manual_seed(3)
    return torch.randn(LENGTH, config.latent_width, generator=generator)


def paged(page_size):
    """The latents over shuffled pages, and the page table."""
    count = LENGTH // page_size
    table = torch.randperm(count, generator=torch.Generator().manual_seed(page_size))
    pool = torch.empty(count, 1, page_size, model().config.latent_width)
    pool[table] = sequence_latents().view(count, 1, page_size, -1)
    return pool, tuple(table.tolist())


def rows(page_size, form, start, end):
    pool, table = paged(page_size)
    batch = Batch.build([one_slice(table, start, end)], [tokens_of(end - start)], page_size)
    return model()(batch, pool, form)


def rms(x, weight, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, cos, sin):
    """x [..., rope] in interleaved pairs, rotated; cos, sin [..., rope / 2]."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def attention(mla, x, latents, start):
    """Equations of DeepSeek-V2, section 2.1, over one dense tensor; latents gain the rows."""
    table = model().rope_table()
    here = slice(start, start + len(x))
    cos, sin = table.cos[here, ::2].double(), table.sin[here, 1::2].double()
    both = x @ mla.qkv_a_proj.weight.T
    query = rms(both[:, : mla.q_rank], mla.q_a_norm) @ mla.q_b_proj.weight.T
    query = query.view(len(x), mla.heads, -1)
    new = both[:, mla.q_rank :]
    latents[here, : mla.rank] = rms(new[:, : mla.rank], mla.kv_a_norm)
    latents[here, mla.rank :] = turned(new[:, mla.rank :], cos, sin)
    outputs = []
    for head in range(mla.heads):
        keys = torch.cat([latents[:, : mla.rank] @ mla.k_b_proj[head].T, latents[:, mla.rank :]], 1)
        rotated = turned(query[:, head, mla.nope :], cos, sin)
        scores = torch.cat([query[:, head, : mla.nope], rotated], 1) @ keys.T * mla.scale
        later = torch.arange(LENGTH)[None, :] > torch.arange(here.start, here.stop)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        outputs.append(weights @ (latents[:, : mla.rank] @ mla.v_b_proj[head].T))
    return torch.cat(outputs, 1) @ mla.o_proj.weight.T


@functools.cache
def plain(start, end):
    """The rows' hidden states in float64 without pages, splits or forms."""
    double = copy.deepcopy(model()).double()
    latents = sequence_latents().double()
    x = double.embed_tokens[tokens_of(end - start)]
    block = double.layers[0]
    x = x + attention(block.self_attn, rms(x, block.input_norm), latents, start)
    padded = torch.cat([x, x.new_zeros(-len(x) % 4, x.shape[1])])
    return block.feed_forward(padded, len(x))[: len(x)]


def test_the_last_position_decodes_as_in_float64_and_alike_for_two_page_sizes():
    got = rows(64, "absorbed", LENGTH - 1, LENGTH)
    torch.testing.assert_close(got.double(), plain(LENGTH - 1, LENGTH), atol=2e-4, rtol=1e-3)
    assert equal(rows(16, "absorbed", LENGTH - 1, LENGTH), got)


@pytest.mark.parametrize("form", ["mha", "absorbed"])
def test_a_chunk_near_the_end_is_as_in_float64_and_alike_for_two_page_sizes(form):
    start, end = LENGTH - 70, LENGTH - 54  # rows of two splits
    got = rows(64, form, start, end)
    torch.testing.assert_close(got.double(), plain(start, end), atol=2e-4, rtol=1e-3)
    assert equal(rows(16, form, start, end), got)


def test_rope_beyond_the_original_length_is_that_of_transformers():
    raw = TINY | LONG
    table = rope_table(ModelConfig.from_hf(raw), torch.device("cpu"))
    theirs = DeepseekV3RotaryEmbedding(DeepseekV3Config(**raw))
    positions = torch.tensor([[0, 1, 4095, 4096, 4097, 65_535, 65_536, 131_071]])
    cos, sin = theirs(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    torch.testing.assert_close(table.cos[positions[0], ::2], cos[0, :, :half])
    torch.testing.assert_close(table.sin[positions[0], 1::2], sin[0, :, :half])
    unscaled = rope_table(ModelConfig.from_hf(raw | {"rope_scaling": None}), torch.device("cpu"))
    assert not torch.allclose(unscaled.cos[65_536], table.cos[65_536], atol=0.1)


def test_a_position_beyond_the_longest_is_refused_and_the_slot_of_a_draft_is_not():
    pool, table = paged(64)
    pool = torch.cat([pool, pool[:1]])
    longer = (*table, LENGTH // 64)
    beyond = Batch.build([SequenceSlice(longer, LENGTH - 1, LENGTH + 1, LENGTH - 1)], [[1, 2]])
    with pytest.raises(ValueError, match="position 131072 is beyond max_position_embeddings"):
        model()(beyond, pool, "absorbed")
    # Three guesses of the last position, the third in a slot beyond it.
    tree = SequenceSlice(longer, LENGTH - 2, LENGTH + 1, LENGTH - 2, (-1, 0, 0))
    hidden = model()(Batch.build([tree], [[1, 2, 3]]), pool, "absorbed")
    assert bool(hidden.isfinite().all())
