"""The model on a device, with its weights in FP8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pdmesh.kernels.backends import Backends, Shapes, choose_backends
from pdmesh.kernels.quantised import LATENT_BYTES
from pdmesh.model.batch import Batch, Form
from pdmesh.model.config import ModelConfig
from pdmesh.model.device.graphs import Capture, StepGraphs, Steps, cuda_capture
from pdmesh.model.device.layers import Layers, head_logits
from pdmesh.model.device.loading import load_weights
from pdmesh.model.device.padding import fits, graph_sizes
from pdmesh.model.device.step import DeviceStep, plan_step
from pdmesh.model.device.weights import LayerWeights, ModelWeights, MtpWeights
from pdmesh.model.machine import backends_for
from pdmesh.model.random_weights import served_config
from pdmesh.model.rope import rope_table
from pdmesh.model.weights import Progress
from pdmesh.wire.random_weights import RandomWeights


class DeviceModel:
    """A `ComputingModel` whose matrices stay in FP8 and whose rows are quantised on the way.

    Hidden states are bfloat16. A row's result may depend on how many rows there are: another number
    of rows may be computed by another kernel.

    Args:
        config: of the model.
        weights: on one device.
        ops: what computes; by default the best for the device.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: Backends | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops or choose_backends(self.device, shapes_of(config))
        self._layers = Layers(config, rope_table(config, self.device), self.ops)
        self._graphs: tuple[list[StepGraphs], list[StepGraphs]] = ([], [])
        self._pool: Tensor | None = None

    @staticmethod
    def load(
        path: str | Path,
        device: torch.device | str = "cpu",
        mtp: bool = True,
        progress: Progress | None = None,
        page_size: int = 64,
        latent_bytes: int = 2,
        held: Sequence[Sequence[int]] | None = None,
        random: RandomWeights | None = None,
    ) -> DeviceModel:
        """Read a checkpoint; matrices that it does not hold in FP8 are quantised.

        Args:
            path, device, mtp, progress: as in `load_model`.
            page_size: tokens a page.
            latent_bytes: of a value in the pool: 2, or 1 for packed latents.
            held: as in `build_weights`.
            random: weights to make instead of reading them; then `path` need not hold any.

        Raises:
            ConfigError: as `load_model` and `of`.
        """
        path, device = Path(path), torch.device(device)
        config = served_config(path, random)
        weights = load_weights(path, config, device, mtp, progress, held, random)
        return DeviceModel.of(config, weights, page_size, latent_bytes)

    @staticmethod
    def of(
        config: ModelConfig, weights: ModelWeights, page_size: int = 64, latent_bytes: int = 2
    ) -> DeviceModel:
        """A model of weights that are there; the arguments are those of `load`.

        Raises:
            ConfigError: see `backends_for`.
        """
        shapes = shapes_of(config, page_size, latent_bytes)
        return DeviceModel(config, weights, backends_for(weights.embedding.device, shapes))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states."""
        return self.weights.embedding.dtype

    @property
    def num_latent_layers(self) -> int:
        """Layers a page holds: num_layers, plus one with MTP."""
        return self.config.num_hidden_layers + (self.weights.mtp is not None)

    def new_latents(self, num_pages: int, page_size: int = 64, packed: bool = False) -> Tensor:
        """An empty pool [num_pages, num_latent_layers, page_size, width] of the model's dtype, or
        of packed latents [..., 656] uint8."""
        width = LATENT_BYTES if packed else self.config.latent_width
        dtype = torch.uint8 if packed else self.dtype
        shape = (num_pages, self.num_latent_layers, page_size, width)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        latents: Tensor,
        form: Form,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `DeepseekV3.forward`; [T, hidden] bfloat16."""
        self.check(batch, latents)
        if on_layer is None and (graphs := self._graphs_for(batch, form, latents, 0)):
            return graphs.run(batch, self.num_latent_layers)
        step = plan_step(batch, form, latents.shape[1], first_key=0)
        return self.run(self._layers.planned(step), latents, on_layer)

    @torch.no_grad()
    def mtp_forward(
        self, batch: Batch, previous_hidden: Tensor, latents: Tensor, form: Form
    ) -> Tensor:
        """As `DeepseekV3.mtp_forward`; [T, hidden] bfloat16."""
        self.check_mtp(batch, latents)
        if graphs := self._graphs_for(batch, form, latents, 1):
            return graphs.run(batch, self.num_latent_layers, previous_hidden)
        step = plan_step(batch, form, latents.shape[1], first_key=1)
        return self.run_mtp(self._layers.planned(step), previous_hidden, latents)

    @torch.no_grad()
    def capture(
        self,
        pool: Tensor,
        rows: Sequence[int],
        most: int,
        mtp_rows: Sequence[int] = (),
        recorder: Capture | None = None,
    ) -> None:
        """From now on computes decode steps over `pool` by graphs, captured here.

        Args:
            pool: the pages; steps over another pool are computed without.
            rows: numbers of rows a sequence, of the main model's graphs.
            most: sequences of the largest step.
            mtp_rows: as `rows`, of the MTP layer's graphs.
            recorder: how; by default CUDA graphs with one memory.
        """
        self.capture_sizes(pool, rows, graph_sizes(most), mtp_rows, recorder)

    @torch.no_grad()
    def capture_sizes(
        self,
        pool: Tensor,
        rows: Collection[int],
        sizes: Sequence[int],
        mtp_rows: Collection[int] = (),
        recorder: Capture | None = None,
    ) -> None:
        """As `capture`, for steps of these ascending numbers of sequences."""
        recorder = recorder or cuda_capture(torch.cuda.graph_pool_handle())
        page_size = pool.shape[2]
        longest = -(-self.config.max_position_embeddings // page_size)
        pages = min(longest, pool.shape[0])
        self._pool = pool

        def main(steps: Steps, _: Tensor | None) -> Tensor:
            return self.run(steps[0], pool)

        def mtp(steps: Steps, previous: Tensor | None) -> Tensor:
            assert previous is not None
            return self.run_mtp(steps[0], previous, pool)

        kinds = ((main, rows, None), (mtp, mtp_rows, self.weights.embedding[:0]))
        for first_key, (compute, counts, previous) in enumerate(kinds):
            for count in sorted(set(counts)):
                graphs = StepGraphs(
                    compute,
                    count,
                    sizes,
                    pages,
                    previous,
                    first_key,
                    self.device,
                    self._layers.planned,
                    recorder,
                )
                graphs.warm_up("mtp" if first_key else "main")
                self._graphs[first_key].append(graphs)

    def _graphs_for(
        self, batch: Batch, form: Form, latents: Tensor, first_key: int
    ) -> StepGraphs | None:
        if self._pool is None or latents.data_ptr() != self._pool.data_ptr():
            return None
        return next(
            (g for g in self._graphs[first_key] if fits(batch, form, g.rows, g.sizes, g.pages)),
            None,
        )

    def run(
        self, step: DeviceStep, pool: Tensor, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        """The main model's layers over a planned step: [m, hidden]."""
        return self._run(self.weights.layers, self.entering(step), step, pool, 0, on_layer)

    def run_mtp(self, step: DeviceStep, previous: Tensor, pool: Tensor) -> Tensor:
        """The MTP layer over a planned step; previous [m, hidden]: [m, hidden]."""
        layers, first = (self.mtp.layer,), self.config.num_hidden_layers
        return self._run(layers, self.entering_mtp(step, previous), step, pool, first, None)

    @property
    def mtp(self) -> MtpWeights:
        """The MTP layer.

        Raises:
            ValueError: there is none.
        """
        if self.weights.mtp is None:
            raise ValueError("this model has no MTP layer")
        return self.weights.mtp

    @property
    def layers(self) -> Layers:
        """The arithmetic of the layers."""
        return self._layers

    def entering(self, step: DeviceStep) -> Tensor:
        """What goes into the first layer: [m, hidden]."""
        return F.embedding(step.tokens, self.weights.embedding)

    def entering_mtp(self, step: DeviceStep, previous: Tensor) -> Tensor:
        """What goes into the MTP layer: [m, hidden]."""
        mtp, eps = self.mtp, self.config.rms_norm_eps
        token = self.ops.rms_norm(self.entering(step), mtp.enorm, eps)
        before = self.ops.rms_norm(previous, mtp.hnorm, eps)
        return F.linear(torch.cat([token, before], dim=-1), mtp.eh_proj)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.logits`."""
        return self._head(hidden, self.weights.norm)

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """As `DeepseekV3.mtp_logits`."""
        return self._head(hidden, self.mtp.head_norm)

    @torch.no_grad()
    def _head(self, hidden: Tensor, norm: Tensor) -> Tensor:
        normed = self.ops.rms_norm(hidden, norm, self.config.rms_norm_eps)
        return head_logits(normed, self.weights.head)

    def _run(
        self,
        layers: tuple[LayerWeights, ...],
        residual: Tensor,
        step: DeviceStep,
        pool: Tensor,
        first: int,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """Changes `residual` in place and returns it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        output: Tensor | None = None
        for index, weights in enumerate(layers, start=first):
            if output is None:
                rows, _ = ops.rms_norm_quantise(residual, weights.input_norm, eps)
            else:
                rows, _ = ops.add_rms_norm_quantise(output, residual, weights.input_norm, eps)
            attended = self._layers.run(weights, rows, step, pool, index)
            if on_layer is not None:
                on_layer(index)
            rows, normed = ops.add_rms_norm_quantise(attended, residual, weights.post_norm, eps)
            output = self._layers.feed_forward(weights.mlp, rows, normed, step.num_rows)
        assert output is not None
        return residual.add_(output)

    def check_mtp(self, batch: Batch, latents: Tensor) -> None:
        """As `check`, for the MTP layer; it has no row for position 0."""
        self.check(batch, latents)
        _ = self.mtp
        if any(item.start == 0 for item in batch.slices):
            raise ValueError("the MTP layer has no row for position 0")

    def check(self, batch: Batch, latents: Tensor) -> None:
        """Whether a batch can be computed over these pages.

        Raises:
            ValueError: it cannot.
        """
        layers, width = self.num_latent_layers, self.config.latent_width
        if latents.dtype == torch.uint8:
            width = LATENT_BYTES
        right = latents.dim() == 4 and latents.shape[1] == layers and latents.shape[3] == width
        if not right or not latents.is_contiguous():
            raise ValueError(
                f"latents must be a contiguous [pages, {layers}, page_size, {width}] tensor, this "
                f"one is {list(latents.shape)}"
            )
        if latents.shape[2] != batch.page_size:
            raise ValueError(
                f"latents have pages of {latents.shape[2]}, the batch of {batch.page_size}"
            )
        if batch.last_position >= self.config.max_position_embeddings:
            raise ValueError(
                f"position {batch.last_position} is beyond max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )


def shapes_of(config: ModelConfig, page_size: int = 64, latent_bytes: int = 2) -> Shapes:
    """What the choice of kernels depends on."""
    return Shapes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        nope=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        intermediate=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        page_size=page_size,
        latent_bytes=latent_bytes,
    )
