"""Batches for training, drawn on the device: each epoch shuffles the documents and packs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdmesh.tools.tiny_pack import DIALOGUE, ROLE_FORM, ROLE_USER, SEED, STORY_CHAT, TEXT, Packed
from pdmesh.tools.tiny_tokenizer import BOS_ID


@dataclass(frozen=True)
class Mix:
    """How many passes over each group of documents one epoch makes, and what a user turn weighs."""

    text: float = 1.0
    dialogue: float = 1.0
    story_chat: float = 0.0
    seed: float = 0.0
    user_weight: float = 1.0


PRETRAIN = Mix()
ANNEAL = Mix(story_chat=0.4, seed=0.25)
SFT = Mix(text=0.35, dialogue=0.7, story_chat=0.6, seed=1.0, user_weight=0.5)

POLISH = Mix(text=0.02, dialogue=0.05, story_chat=0.08, seed=0.7, user_weight=0.5)


class Batches:
    """An endless source of (tokens, weights): [batch, context + 1] int64 and float32."""

    def __init__(self, packed: Packed, device: torch.device, seed: int) -> None:
        self.ids = torch.from_numpy(packed.ids.astype(np.int32)).to(device)
        self.roles = torch.from_numpy(packed.roles).to(device)
        self.starts = torch.from_numpy(packed.starts[:-1]).to(device)
        self.lengths = torch.from_numpy(np.diff(packed.starts)).to(device)
        self.group = torch.from_numpy(packed.group).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def epoch(self, mix: Mix) -> tuple[Tensor, Tensor]:
        """One epoch of the mix, packed: ids [N] int32 and target weights [N] float32."""
        device = self.ids.device
        passes = torch.zeros(4, device=device)
        for group, value in (
            (TEXT, mix.text),
            (DIALOGUE, mix.dialogue),
            (STORY_CHAT, mix.story_chat),
            (SEED, mix.seed),
        ):
            passes[group] = value
        draw = torch.rand(len(self.starts), generator=self.generator, device=device)
        chosen = torch.nonzero(draw < passes[self.group.long()]).squeeze(1)
        order = torch.randperm(len(chosen), generator=self.generator, device=device)
        chosen = chosen[order]
        lengths = self.lengths[chosen]
        ends = lengths.cumsum(0)
        offset = torch.repeat_interleave(self.starts[chosen] - (ends - lengths), lengths)
        index = torch.arange(int(ends[-1]), device=device) + offset
        roles = self.roles[index]
        weights = torch.ones_like(roles, dtype=torch.float32)
        weights[roles == ROLE_USER] = mix.user_weight
        dialogue_form = (roles == ROLE_FORM) & (self.ids[index] != BOS_ID)
        weights[dialogue_form] = mix.user_weight
        return self.ids[index], weights

    def batches(self, mix: Mix, batch: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of one epoch; what does not fill a batch is left out."""
        ids, weights = self.epoch(mix)
        size = batch * context
        begin = int(torch.randint(0, context, (1,)).item()) if len(ids) > 2 * size else 0
        while begin + size + 1 <= len(ids):
            rows = torch.arange(batch, device=ids.device)[:, None] * context + begin
            index = rows + torch.arange(context + 1, device=ids.device)
            yield ids[index].long(), weights[index]
            begin += size
