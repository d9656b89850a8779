"""TNGD: natural gradient by letting a noisy linear system relax, simulated; for small models.

Donatella et al. 2024 (arXiv 2405.13817). An Ornstein-Uhlenbeck process with drift `-(A x - b)` has
the mean `A^-1 b`; with `A = G + lam I`, G the Gauss-Newton matrix, and b the gradient that is the
natural gradient. Analog hardware would run it; here each step of it costs a product with G.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from adaptive_platform.errors import CheckpointError, UserError
from adaptive_platform.optimizers.config import Share
from adaptive_platform.optimizers.exchange import Exchange
from adaptive_platform.optimizers.natural.capture import Capture
from adaptive_platform.optimizers.natural.coverage import Coverage
from adaptive_platform.optimizers.natural.driven import ListeningOptimizer
from adaptive_platform.optimizers.natural.kronecker import NeedsModelConfig

__all__ = ["TNGD", "TngdConfig", "conjugate_gradient", "relax", "woodbury_solve"]

Product = Callable[[Tensor], Tensor]
"""Multiplies a vector by a fixed symmetric matrix."""

_MOST_PRODUCTS = 8
_ROUNDING = 1e-4
"""By so much a drift may seem to grow where it has become nothing but rounding."""


def relax(
    product: Product,
    target: Tensor,
    start: Tensor,
    *,
    duration: float,
    time_step: float,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Euler-Maruyama: `x <- x - dt (A x - b) + sqrt(2 kappa0 dt) z`.

    Stable for `dt < 2 / lambda_max(A)`, which no one knows beforehand: where a step makes the drift
    larger, it was longer than that, and is made again with half of dt. The circuit itself has no
    such limit. The paper prints the drift with the other sign, which diverges.

    Args:
        product: A, positive definite; called eight times as often as planned at most, after which
            the relaxation ends early.
        target: b.
        start: x at time 0.
        duration: t, in relaxation times of the circuit; 0 returns `start`.
        time_step: dt.
        temperature: kappa0; 0 for no noise.
        generator: Of the noise, on the CPU.
    """
    state = start.clone()
    steps = round(duration / time_step)
    if steps == 0:
        return state
    drift = target - product(state)
    left, most = float(steps), _MOST_PRODUCTS * steps
    share = 1.0  # of the planned time step
    for _ in range(most):
        step = time_step * min(share, left)
        moved = state + step * drift
        drift_there = target - product(moved)
        if float(drift_there.norm()) > float(drift.norm()) * (1.0 + _ROUNDING):
            share /= 2.0
            continue
        state, drift, left = moved, drift_there, left - step / time_step
        if temperature:
            spread = math.sqrt(2.0 * temperature * step)
            noise = torch.randn(state.shape, generator=generator, dtype=state.dtype)
            noise = spread * noise.to(state.device)
            state += noise
            if left > 0:
                drift = drift - product(noise)
        if left <= 0:
            break
    return state


def conjugate_gradient(
    product: Product, target: Tensor, start: Tensor, *, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve `A x = b` for positive definite A.

    Args:
        product: A.
        target: b.
        start: First guess.
        iterations: Most products.
        tolerance: Residual relative to |b| at which to stop.
    """
    state = start.clone()
    residual = target - product(state)
    direction = residual.clone()
    size = residual.dot(residual)
    for _ in range(iterations):
        if float(size.sqrt()) <= tolerance * float(target.norm()):
            break
        image = product(direction)
        length = size / direction.dot(image)
        state += length * direction
        residual -= length * image
        before, size = size, residual.dot(residual)
        direction = residual + (size / before) * direction
    return state


def woodbury_solve(jacobian: Tensor, hessian: Tensor, target: Tensor, damping: float) -> Tensor:
    """`(J^T H J / b + lam I)^-1 v` from a system of the outputs' size; the exact reference.

    `[I / lam - U (I + V U / lam)^-1 V / lam^2] v` with `U = J^T`, `V = H J / b`.

    Args:
        jacobian: J of b samples and d outputs, `[b, d, parameters]`.
        hessian: Of each sample's loss in its outputs, `[b, d, d]`.
        target: v, `[parameters]`.
        damping: lam.
    """
    samples, outputs, _ = jacobian.shape
    curved = (hessian @ jacobian / samples).flatten(0, 1)
    flat = jacobian.flatten(0, 1)
    identity = torch.eye(samples * outputs, dtype=flat.dtype, device=flat.device)
    inner = identity + curved @ flat.T / damping
    solved = torch.linalg.solve(inner, curved @ target)
    return target / damping - flat.T @ solved / damping**2


class TngdConfig(NeedsModelConfig):
    """Thermodynamic natural gradient, simulated, for softmax cross entropy; see `TNGD`."""

    assumes_cross_entropy: ClassVar[bool] = True

    kind: Literal["tngd"] = "tngd"
    lr: float = Field(default=0.01, gt=0)
    """Learning rate at the base batch, before schedule and learning-rate rule; > 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay per unit of learning rate, added after the solution; >= 0."""
    momentum: Share = 0.0
    """Share of the old step that stays; in [0, 1)."""
    damping: float = Field(default=0.01, gt=0)
    """lam, > 0."""
    solver: Literal["thermodynamic", "conjugate_gradient"] = "thermodynamic"
    """`conjugate_gradient` is the exact reference."""
    duration: float = Field(default=50.0, ge=0)
    """Time the system relaxes per step, in its relaxation times; 0 gives SGD. Thermodynamic."""
    time_step: float = Field(default=0.1, gt=0)
    """dt of the simulation, shortened where it is no longer stable. Thermodynamic."""
    temperature: float = Field(default=0.0, ge=0)
    """kappa0 of the thermal noise; up to 0.01 does no harm. Thermodynamic."""
    noise_seed: int = Field(default=0, ge=0)
    """Seed of the noise, the same on all workers. Thermodynamic."""
    iterations: int = Field(default=100, ge=1)
    """Most products with the matrix. Conjugate gradient."""

    def build_for(
        self,
        model: nn.Module,
        exchange: Exchange | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ) -> TNGD:
        """`TNGD` over the trainable parameters of `model`, with a hook on its forward pass.

        Args:
            model: Gives class scores; without dropout.
            exchange: The workers; alone where None.
            warn: Told, on the first worker, when a solution is not finite.

        Raises:
            UserError: The model has dropout, which would make every product another matrix.
        """
        return TNGD(self, model, exchange or Exchange(), warn)


class TNGD(ListeningOptimizer):
    """Relaxes towards `(G + lam I)^-1 gradient` from the last step's solution, then steps along it.

    G is the Gauss-Newton matrix of all workers' samples for softmax cross entropy, whatever the
    targets. Micro-batch inputs are kept until the step, and the model is evaluated on them again
    without touching batch norm's running averages. The delay of the paper's hardware is not
    simulated, which is its `t_d = 0`.

    Args:
        config: All settings.
        model: The network.
        exchange: The workers.
        warn: Told when a solution is not finite; the plain gradient is used then.
    """

    def __init__(
        self,
        config: TngdConfig,
        model: nn.Module,
        exchange: Exchange,
        warn: Callable[[str], None],
    ) -> None:
        for name, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.p > 0:
                raise UserError(
                    f"optimizer.kind = tngd: `{name}` is dropout, with which the curvature would "
                    "change within a step. Set its p to 0, or take another optimizer."
                )
        groups = config.groups(model.named_parameters())
        defaults = {"lr": config.lr, "momentum": config.momentum, "weight_decay": 0.0}
        super().__init__(groups, defaults, 1.0)
        self.coverage = Coverage((), ())
        self._config, self._model, self._exchange, self._warn = config, model, exchange, warn
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._listening = _Listening()
        self._capture = self._listening
        self._handle = model.register_forward_pre_hook(self._keep_inputs, with_kwargs=True)
        self._solution: Tensor | None = None
        self._warned = False

    def describe(self) -> str:
        """What is preconditioned, in words."""
        return "natural gradient: all parameters together, by Gauss-Newton products"

    def close(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()

    def _keep_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._listening.active and torch.is_grad_enabled():
            self._inputs.append((args, kwargs))

    def _forget(self) -> None:
        self._inputs = []

    def _directions(self, samples: int) -> dict[nn.Parameter, Tensor]:
        config = self._config
        params = [p for p in self._model.parameters() if p.requires_grad and p.grad is not None]
        target = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        start = self._solution
        if start is None or start.numel() != target.numel():
            start = target
        with _batch_statistics_only(self._model), torch.enable_grad():
            product = self._product(params, samples)
            if config.solver == "conjugate_gradient":
                solution = conjugate_gradient(product, target, start, iterations=config.iterations)
            else:
                generator = torch.Generator().manual_seed(config.noise_seed * 2**20 + self._steps)
                solution = relax(
                    product,
                    target,
                    start,
                    duration=config.duration,
                    time_step=config.time_step,
                    temperature=config.temperature,
                    generator=generator,
                )
        self._forget()
        self._solution = solution
        if not bool(solution.isfinite().all()):
            self._solution = None
            solution = target
            if not self._warned and self._exchange.rank == 0:
                self._warned = True
                self._warn(
                    "the natural gradient is not finite: the plain one is used. Raise "
                    "optimizer.damping, or lower optimizer.lr."
                )
        pieces = solution.split([p.numel() for p in params])
        return {p: piece.view(p.shape) for p, piece in zip(params, pieces, strict=True)}

    def _product(self, params: list[nn.Parameter], samples: int) -> Product:
        """`v -> (G + lam I) v` over all workers. Graphs are made once; a product is two passes."""
        maps = [_ScoreMap(self._model(*args, **kwargs), params) for args, kwargs in self._inputs]

        def product(vector: Tensor) -> Tensor:
            total = torch.zeros_like(vector)
            for each in maps:
                total += each.curvature(vector)
            self._exchange.all_reduce(total)
            return total / samples + self._config.damping * vector

        return product

    def natural_state(self) -> dict[str, Any]:
        """The last solution, from which the next step starts."""
        return {**super().natural_state(), "solution": self._solution}

    def load_natural_state(self, saved: Mapping[str, Any]) -> None:
        """See the base class."""
        solution = saved["solution"]
        params = [p for p in self._model.parameters() if p.requires_grad]
        if solution is not None and solution.numel() > sum(p.numel() for p in params):
            raise CheckpointError(
                "checkpoint: its natural gradient is of another model. Resume with the model it "
                "was saved with."
            )
        super().load_natural_state(saved)
        self._solution = None
        if solution is not None:
            self._solution = solution.to(params[0].device, copy=True)


class _ScoreMap:
    """The scores of one micro-batch as a function of the parameters, near where they are now.

    `J^T w` is linear in w, so its derivative gives `J v`: products with J need backward passes
    only.
    """

    def __init__(self, scores: Tensor, params: list[nn.Parameter]) -> None:
        self._scores = scores
        self._params = params
        self._chances = scores.detach().softmax(-1)
        self._weights = torch.zeros_like(scores, requires_grad=True)
        self._pulled = torch.autograd.grad(
            scores, params, self._weights, create_graph=True, allow_unused=True
        )

    def curvature(self, vector: Tensor) -> Tensor:
        """`J^T H J v`, summed over the samples, for softmax cross entropy."""
        pieces = vector.split([p.numel() for p in self._params])
        used = [
            (pulled, piece.view_as(pulled))
            for pulled, piece in zip(self._pulled, pieces, strict=True)
            if pulled is not None and pulled.requires_grad
        ]
        (moved,) = torch.autograd.grad(
            [pulled for pulled, _ in used],
            self._weights,
            [piece for _, piece in used],
            retain_graph=True,
        )
        p = self._chances
        curved = p * moved - p * (p * moved).sum(-1, keepdim=True)
        back = torch.autograd.grad(
            self._scores, self._params, curved, retain_graph=True, allow_unused=True
        )
        return torch.cat(
            [
                (torch.zeros_like(param) if each is None else each).reshape(-1)
                for each, param in zip(back, self._params, strict=True)
            ]
        )


class _Listening(Capture):
    """A capture of no layers: it only knows whether a step is under way."""

    def __init__(self) -> None:
        super().__init__((), lambda *_: None, lambda _: False)

    @property
    def active(self) -> bool:
        """Between `begin` and `end`, and not paused."""
        return self._active


@contextmanager
def _batch_statistics_only(model: nn.Module) -> Iterator[None]:
    """Training-mode batch norm without running averages, which a further pass would move."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    kept = [(m.running_mean, m.running_var, m.num_batches_tracked) for m in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        yield
    finally:
        for layer, buffers in zip(layers, kept, strict=True):
            layer.running_mean, layer.running_var, layer.num_batches_tracked = buffers
