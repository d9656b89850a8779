"""Flat gradient buckets: filled while backward runs, measured, and sent as soon as one is full.

Torch's DDP averages, dies with a lost peer and hides the local gradient; here reductions are sums,
process groups can be replaced between steps, and each bucket is measured before it leaves.

A step on one worker is `begin_step`, then per micro-batch `begin_microbatch` and a backward pass,
then `finish`. Between `finish` and `release` each parameter's `.grad` is a view into its bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from adaptive_platform.errors import UserError

__all__ = ["GradientBuckets", "Pending", "Preconditioner", "bucket_layout"]


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum over all workers; raise when it failed."""


class Preconditioner(Protocol):
    """Norms in the optimizer's own eyes: those of `P g`, with one P for all of a step."""

    @property
    def active(self) -> bool:
        """False while P is the identity."""

    def begin(self) -> None:
        """Fix P for the step to come, alike on all workers."""

    def sqnorms(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
        """|P g|^2 of each parameter, float32."""


class Exchange(Protocol):
    """Sums all gradients of a step at its end, with a state that only committed steps move."""

    def prepare(self, lengths: Sequence[int], device: torch.device) -> None:
        """Expect gradients of these lengths from now on."""

    def sum(self, gradients: Sequence[Tensor], rider: Tensor) -> None:
        """Sum 1-D gradients, which may stay incomplete, and the rider exactly, in place."""

    def commit(self) -> None:
        """The step of the latest `sum` counts."""


def bucket_layout(sizes_bytes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Group parameters in backward order into buckets (Yamazaki et al. 2019, static groups).

    Args:
        sizes_bytes: Size of each parameter in registration order.
        limit_bytes: A bucket closes once it holds at least this much.

    Returns:
        Indices per bucket, last-registered parameter first: the order in which gradients get ready.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0
    for index in reversed(range(len(sizes_bytes))):
        current.append(index)
        held += sizes_bytes[index]
        if held >= limit_bytes:
            buckets.append(current)
            current, held = [], 0
    if current:
        buckets.append(current)
    return buckets


@dataclass(slots=True)
class _Bucket:
    """One flat buffer, the parameters whose gradients it holds, and the count still missing."""

    flat: Tensor
    gradient: Tensor
    parameters: list[nn.Parameter]
    names: list[str]
    views: list[Tensor]
    first_layer: int = 0
    """Where its parameters start in a vector with one entry per layer."""
    squares: Tensor | None = None
    """Float32 sums of squared gradients, flat; only in a step that takes them."""
    square_views: list[Tensor] = field(default_factory=list)
    missing: int = 0
    fired: set[int] = field(default_factory=set)


class GradientBuckets:
    """Owns the gradients of a model between backward and the optimizer.

    Args:
        named_parameters: As from `module.named_parameters()`. Frozen ones are left out, a shared
            one counts once under its first name.
        start: Starts the in-place sum of a 1-D buffer over all workers (`Reducer.start`).
        bucket_bytes: Size at which a bucket closes.
        rider_slots: Length of the float32 vector that rides at the end of the last bucket, so
            that the step's statistics cost no message of their own.
        layers: Also take the squared norm of each parameter's gradient; they ride along too.
        preconditioner: What noise is measured through; plain gradients where None.
        start_gradients: Like `start`, for gradients alone, whose sum need not be exact. The rider
            then travels by itself.
        exchange: Sums everything at the end of a step instead.

    Raises:
        UserError: Nothing to train, or parameters of a type whose norm float32 can't hold.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        start: Callable[[Tensor], Pending],
        *,
        bucket_bytes: int,
        rider_slots: int,
        layers: bool = False,
        preconditioner: Preconditioner | None = None,
        start_gradients: Callable[[Tensor], Pending] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                unique.setdefault(id(parameter), (name, parameter))
        if not unique:
            raise UserError("model: it has no parameter that requires a gradient.")
        named = list(unique.values())
        for name, parameter in named:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise UserError(
                    f"model: parameter `{name}` is of type {parameter.dtype}; train in float32, "
                    "float16 or bfloat16, such as with model.float()."
                )
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._start = start
        self._start_gradients = start_gradients or start
        self._exchange = exchange
        self._measure = True
        self._preconditioner = preconditioner
        self.preconditioned = False
        """True in a step whose norms, but for the summed gradient's own, are those of `P g`."""
        self.statistics_seconds = 0.0
        """Host time that this step's squared norms took."""
        device = self.parameters[0].device
        # The rider: the caller's slots, one "was used" mark per parameter, one number per layer.
        self._rider_slots = rider_slots
        num_layers = len(named) if layers else 0
        rider_length = rider_slots + len(named) + num_layers
        self._buckets = self._allocate(
            named,
            bucket_bytes,
            rider_length,
            rider_apart=start_gradients is not None or exchange is not None,
        )
        if exchange is not None:
            exchange.prepare([b.gradient.numel() for b in self._buckets[:-1]], device)
        last = self._buckets[-1]
        self._rider_all = last.flat[last.gradient.numel() :]
        self.rider = self._rider_all[:rider_slots]
        """Float32 (rider_slots,): written before `finish`, holds the sum over workers after it."""
        self.used = self._rider_all[rider_slots : rider_slots + len(named)]
        """After `finish`: by how many workers each of `parameters` was used."""
        self.layer_rider = self._rider_all[rider_slots + len(named) :]
        """Float32 (layers,) in the order of the buckets, used as `rider` is; empty without."""
        self.layer_sqnorms = torch.zeros(num_layers, device=device)
        """The last micro-batch's squared norm of each layer, in the order of the buckets."""
        self.summed_layer_sqnorms = torch.zeros(num_layers, device=device)
        """After `finish`: the squared norm of each layer of the summed gradient."""
        self._slot_of = {id(p): i for i, p in enumerate(self.parameters)}
        self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
        in_buckets = [p for b in self._buckets for p in b.parameters]
        layer_of = {id(p): layer for layer, p in enumerate(in_buckets)}
        self._model_order = [layer_of[id(p)] for p in self.parameters]
        for bucket in self._buckets:
            if bucket.parameters:
                bucket.first_layer = layer_of[id(bucket.parameters[0])]
        self._microbatch_sqnorm = torch.zeros((), device=device)
        self.summed_sqnorm = torch.zeros((), device=device)
        """After `finish`: squared norm of the sum as micro-batches are measured, so through P."""
        self._pending: list[Pending] = []
        self._launched = 0
        self._alone = False
        self._started_microbatches = 0
        self._first = self._last = self._active = False
        self._square_weight = 0.0
        self._used_here = [0.0] * len(named)
        # One hook per parameter, a few microseconds each against a millisecond of backward per
        # layer: the only way to learn that a gradient is ready while backward still runs.
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._on_gradient) for p in self.parameters
        ]

    def close(self) -> None:
        """Remove the hooks; the model is then as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in self.parameters:
            parameter.grad = None

    def begin_step(self, *, measure: bool, squares: bool = False, alone: bool = False) -> None:
        """Forget an unfinished step, if any, and expect the first micro-batch.

        Args:
            measure: Take the squared norm of each micro-batch's gradient.
            alone: Sum the rider only: each worker keeps the gradient of its own samples. Equal on
                all workers.
            squares: Also sum the squared elements of the micro-batches' gradients over all
                workers, in buffers and messages of their own. Equal on all workers.
        """
        self._measure = measure
        self._alone = alone
        self._active = False
        self.preconditioned = False
        for bucket in self._buckets:
            bucket.squares, bucket.square_views = None, []
            if squares:
                bucket.squares = torch.zeros(
                    bucket.gradient.shape, dtype=torch.float32, device=bucket.flat.device
                )
                bucket.square_views = _views(bucket.squares, bucket.parameters)
        self.statistics_seconds = 0.0
        if measure and self._preconditioner is not None:
            started = time.perf_counter()
            self._preconditioner.begin()
            self.preconditioned = self._preconditioner.active
            self.statistics_seconds += time.perf_counter() - started
        self._pending = []
        self._launched = 0
        self._rider_all.zero_()
        self._used_here = [0.0] * len(self.parameters)
        self._started_microbatches = 0
        for parameter in self.parameters:
            parameter.grad = None

    def begin_microbatch(self, *, last: bool, square_weight: float = 1.0) -> None:
        """Expect one backward pass; buckets are sent while it runs when it is the step's last.

        Args:
            last: No micro-batch follows in this step.
            square_weight: Factor on this micro-batch's squared gradients, where they are taken.
        """
        self._refuse_leftovers(
            "has a gradient before its backward pass: call run.backward(losses) alone, neither "
            "loss.backward() nor a backward pass of your own."
        )
        self._square_weight = square_weight
        self._first = self._started_microbatches == 0
        self._started_microbatches += 1
        self._last = last
        self._active = True
        self._microbatch_sqnorm = torch.zeros_like(self._microbatch_sqnorm)
        if self.layer_sqnorms.numel():
            self.layer_sqnorms.zero_()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.fired.clear()

    def end_microbatch(self) -> Tensor:
        """Take in what backward left, such as buckets with unused parameters.

        Returns:
            Squared norm of this micro-batch's gradient as it was back-propagated: 0-dim float32 on
            the gradients' device, zero where `measure` is off.
        """
        for bucket in self._buckets:
            if bucket.missing:
                self._absorb(bucket)
        self._active = False
        self._refuse_leftovers(
            "got its gradient in two parts, as with reentrant activation checkpointing: use "
            "checkpoint(..., use_reentrant=False)."
        )
        return self._microbatch_sqnorm

    def _refuse_leftovers(self, problem: str) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                raise UserError(f"model: parameter `{name}` {problem}")

    def finish(self) -> Tensor:
        """Send what is left, with the rider, and wait for all sums.

        A worker without a micro-batch in this step contributes zeros.

        Returns:
            Squared norm of the summed gradient: 0-dim float32. Non-finite when any entry is.
        """
        if self._started_microbatches == 0:
            for bucket in self._buckets:
                bucket.gradient.zero_()
        self.used.copy_(torch.tensor(self._used_here))
        if self._alone:
            return self._finish_alone()
        if self._exchange is not None:
            return self._finish_exchanged(self._exchange)
        self._launch(len(self._buckets))
        squares = [self._start(b.squares) for b in self._buckets if b.squares is not None]
        total = torch.zeros_like(self._microbatch_sqnorm)
        self.summed_sqnorm = torch.zeros_like(total)
        for pending, bucket in zip(self._pending, self._buckets, strict=True):
            pending.wait()
            started = time.perf_counter()
            total += self._measure_sum(bucket)
            self.statistics_seconds += time.perf_counter() - started
        for pending in squares:
            pending.wait()
        self._pending = []
        self._show()
        return total

    def _finish_exchanged(self, exchange: Exchange) -> Tensor:
        exchange.sum([bucket.gradient for bucket in self._buckets[:-1]], self._rider_all)
        self._show()
        return self.own_sqnorm()

    def commit(self) -> None:
        """The step counts: the optimizer has taken the summed gradient."""
        if self._exchange is not None:
            self._exchange.commit()

    def _finish_alone(self) -> Tensor:
        self._start(self._rider_all).wait()
        # A parameter that only others used has no gradient here.
        self.used.copy_(torch.tensor(self._used_here))
        self._show()
        return self.own_sqnorm()

    def own_sqnorm(self) -> Tensor:
        """Squared norm of what this worker's buckets hold: 0-dim float32."""
        return torch.stack([_sqnorm(bucket.gradient) for bucket in self._buckets]).sum()

    def _show(self) -> None:
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def abandon(self) -> None:
        """Give up the micro-batch in hand.

        `finish` still sends everything, as others wait for it; the sums are of no use to anyone.
        """
        self._active = False

    def summed(self) -> Iterator[tuple[str, Tensor]]:
        """Name and summed gradient of each parameter, between `finish` and the next step."""
        for bucket in self._buckets:
            yield from zip(bucket.names, bucket.views, strict=True)

    @property
    def parameters_of_sums(self) -> list[nn.Parameter]:
        """Parameters in the order of `summed`."""
        return [p for bucket in self._buckets for p in bucket.parameters]

    def summed_squares(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, summed gradient and weighted sum of squares of each parameter, after `finish`."""
        for bucket in self._buckets:
            yield from zip(bucket.names, bucket.views, bucket.square_views, strict=True)

    def release_squares(self) -> None:
        """Give the memory of the squares back."""
        for bucket in self._buckets:
            bucket.squares, bucket.square_views = None, []

    def in_model_order(self, layers: Sequence[float]) -> list[float]:
        """Numbers in the order of the buckets, put in that of the model's parameters."""
        return [layers[index] for index in self._model_order]

    def drop_unused(self, used: Sequence[float]) -> None:
        """Give parameters that no worker used the gradient None, as a single process would.

        Args:
            used: The content of `used`, read together with the other sums.
        """
        if self._exchange is not None:
            return  # what arrives may be from an earlier step
        for parameter, count in zip(self.parameters, used, strict=True):
            if count == 0.0:
                parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply all summed gradients."""
        for bucket in self._buckets:
            bucket.gradient.mul_(factor)

    def release(self) -> None:
        """Take the gradients away from the parameters, so that backward starts afresh."""
        for parameter in self.parameters:
            parameter.grad = None

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter whose summed gradient is not finite. Synchronises."""
        for bucket in reversed(self._buckets):
            for name, view in reversed(list(zip(bucket.names, bucket.views, strict=True))):
                if not bool(torch.isfinite(view).all()):
                    return name
        return None

    @property
    def num_bytes(self) -> int:
        """Bytes that one reduction sums, rider included."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def _allocate(
        self,
        named: list[tuple[str, nn.Parameter]],
        bucket_bytes: int,
        rider_length: int,
        *,
        rider_apart: bool,
    ) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        kinds = dict.fromkeys((p.dtype, p.device) for _, p in named)
        # Float32 last, since the rider needs it.
        for dtype, device in sorted(kinds, key=lambda kind: kind[0] is torch.float32):
            members = [(n, p) for n, p in named if p.dtype is dtype and p.device == device]
            layout = bucket_layout([p.numel() * p.element_size() for _, p in members], bucket_bytes)
            for indices in layout:
                chosen = [members[i] for i in indices]
                buckets.append(_new_bucket(chosen, dtype, device, 0))
        if buckets[-1].flat.dtype is torch.float32 and not rider_apart:
            last = buckets.pop()
            chosen = list(zip(last.names, last.parameters, strict=True))
            device = last.flat.device
            buckets.append(_new_bucket(chosen, torch.float32, device, rider_length))
        else:
            buckets.append(_new_bucket([], torch.float32, buckets[-1].flat.device, rider_length))
        return buckets

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._active:
            return
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) in bucket.fired:
            return
        bucket.fired.add(id(parameter))
        bucket.missing -= 1
        if bucket.missing == 0:
            self._absorb(bucket)

    def _absorb(self, bucket: _Bucket) -> None:
        """Move fresh gradients into the bucket, measure them, and send the bucket if it is time."""
        views, gradients, present = [], [], []
        for index, (parameter, view, name) in enumerate(
            zip(bucket.parameters, bucket.views, bucket.names, strict=True)
        ):
            if parameter.grad is None:
                if self._first:
                    view.zero_()
                continue
            if parameter.grad.is_sparse:
                raise UserError(
                    f"model: parameter `{name}` has a sparse gradient, which can't be reduced "
                    "together with the others. Build its embedding with sparse=False."
                )
            views.append(view)
            present.append(index)
            gradients.append(parameter.grad)
            self._used_here[self._slot_of[id(parameter)]] = 1.0
            parameter.grad = None
        if gradients:
            if self._measure:
                # Before the copy: on a CPU it then finds the gradients in the cache.
                started = time.perf_counter()
                sqnorms = self._sqnorms([bucket.parameters[i] for i in present], gradients)
                self._microbatch_sqnorm += sqnorms.sum()
                if self.layer_sqnorms.numel():
                    self._keep_layers(bucket, sqnorms, present)
                self.statistics_seconds += time.perf_counter() - started
            if bucket.squares is not None:
                started = time.perf_counter()
                self._add_squares([bucket.square_views[i] for i in present], gradients)
                self.statistics_seconds += time.perf_counter() - started
            if self._first:
                torch._foreach_copy_(views, gradients)
            else:
                torch._foreach_add_(views, gradients)
        bucket.missing = 0
        if self._last:
            self._launch_ready()

    def _keep_layers(self, bucket: _Bucket, sqnorms: Tensor, present: list[int]) -> None:
        first, count = bucket.first_layer, len(bucket.parameters)
        if len(present) == count:
            self.layer_sqnorms[first : first + count] = sqnorms
            return
        for index, sqnorm in zip(present, sqnorms.unbind(), strict=True):
            self.layer_sqnorms[first + index] = sqnorm

    def _add_squares(self, views: list[Tensor], gradients: list[Tensor]) -> None:
        gradients = [g if g.dtype is torch.float32 else g.float() for g in gradients]
        torch._foreach_addcmul_(views, gradients, gradients, self._square_weight)

    def _measure_sum(self, bucket: _Bucket) -> Tensor:
        """Plain squared norm of a summed bucket; what else is measured goes into attributes."""
        by_layer = self._measure and bool(self.layer_sqnorms.numel() or self.preconditioned)
        if not by_layer or not bucket.views:
            plain = _sqnorm(bucket.gradient)
            self.summed_sqnorm += plain
            return plain
        layers = self._sqnorms(bucket.parameters, bucket.views)
        measured = layers.sum()
        self.summed_sqnorm += measured
        if self.layer_sqnorms.numel():
            first = bucket.first_layer
            self.summed_layer_sqnorms[first : first + len(layers)] = layers
        return _sqnorm(bucket.gradient) if self.preconditioned else measured

    def _sqnorms(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
        if self._preconditioner is not None and self.preconditioned:
            return self._preconditioner.sqnorms(parameters, gradients)
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square()

    def _launch_ready(self) -> None:
        if self._alone or self._exchange is not None:
            return
        # In bucket order on every worker, whatever the order of arrival; the last bucket waits
        # for `finish`, because the rider is complete only then.
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
            self._launch(self._launched + 1)

    def _launch(self, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            rides = bucket is self._buckets[-1]
            self._pending.append((self._start if rides else self._start_gradients)(bucket.flat))
        self._launched = max(self._launched, until)


def _new_bucket(
    named: list[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device, extra: int
) -> _Bucket:
    length = sum(p.numel() for _, p in named)
    flat = torch.zeros(length + extra, dtype=dtype, device=device)
    parameters = [p for _, p in named]
    return _Bucket(
        flat=flat,
        gradient=flat[:length],
        parameters=parameters,
        names=[n for n, _ in named],
        views=_views(flat, parameters),
    )


def _views(flat: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Consecutive pieces of `flat` in the shape and layout of the parameters."""
    views, offset = [], 0
    for parameter in parameters:
        piece = flat[offset : offset + parameter.numel()]
        views.append(_view_like(piece, parameter))
        offset += parameter.numel()
    return views


def _view_like(piece: Tensor, parameter: Tensor) -> Tensor:
    """A view with the parameter's own strides, so that channels_last gradients move unpermuted."""
    stride = parameter.stride()
    dense = sorted((s, n) for s, n in zip(stride, parameter.shape, strict=True) if n > 1)
    expected = 1
    for step, count in dense:
        if step != expected:
            return piece.view(parameter.shape)
        expected *= count
    return piece.as_strided(parameter.shape, stride)


def _sqnorm(flat: Tensor) -> Tensor:
    """Sum of squares in float32, 0-dim."""
    if flat.dtype is torch.float32:
        return torch.dot(flat, flat)
    return torch.linalg.vector_norm(flat, dtype=torch.float32).square()
