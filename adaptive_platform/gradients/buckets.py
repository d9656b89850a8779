"""Flat gradient buckets: filled while backward runs, measured, and sent as soon as one is full.

Torch's DDP averages, dies with a lost peer and hides the local gradient; here reductions are sums,
process groups can be replaced between steps, and each bucket is measured before it leaves.

A step on one worker is `begin_step`, then per micro-batch `begin_microbatch` and a backward pass,
then `finish`. Between `finish` and `release` each parameter's `.grad` is a view into its bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from adaptive_platform.errors import UserError

__all__ = ["GradientBuckets", "Pending", "bucket_layout"]


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> None:
        """Return when the buffer holds the sum over all workers; raise when it failed."""


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

    Raises:
        UserError: Nothing to train.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        start: Callable[[Tensor], Pending],
        *,
        bucket_bytes: int,
        rider_slots: int,
    ) -> None:
        unique: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                unique.setdefault(id(parameter), (name, parameter))
        if not unique:
            raise UserError("model: it has no parameter that requires a gradient.")
        named = list(unique.values())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._start = start
        self._measure = True
        self.statistics_seconds = 0.0
        """Host time that this step's squared norms took."""
        device = self.parameters[0].device
        # The rider: the caller's slots, then one "was used" mark per parameter.
        self._rider_slots = rider_slots
        rider_length = rider_slots + len(named)
        self._buckets = self._allocate(named, bucket_bytes, rider_length)
        last = self._buckets[-1]
        self._rider_all = last.flat[last.gradient.numel() :]
        self.rider = self._rider_all[:rider_slots]
        """Float32 (rider_slots,): written before `finish`, holds the sum over workers after it."""
        self._used = self._rider_all[rider_slots:]
        self._slot_of = {id(p): i for i, p in enumerate(self.parameters)}
        self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
        self._microbatch_sqnorm = torch.zeros((), device=device)
        self._pending: list[Pending] = []
        self._launched = 0
        self._started_microbatches = 0
        self._first = self._last = self._active = False
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

    def redirect(self, start: Callable[[Tensor], Pending]) -> None:
        """Send later steps through another reducer, after the workers changed."""
        self._start = start

    def begin_step(self, *, measure: bool) -> None:
        """Forget an unfinished step, if any, and expect the first micro-batch.

        Args:
            measure: Take the squared norm of each micro-batch's gradient.
        """
        self._measure = measure
        self.statistics_seconds = 0.0
        self._pending = []
        self._launched = 0
        self._rider_all.zero_()
        self._used_here = [0.0] * len(self.parameters)
        self._started_microbatches = 0
        for parameter in self.parameters:
            parameter.grad = None

    def begin_microbatch(self, *, last: bool) -> None:
        """Expect one backward pass; buckets are sent while it runs when it is the step's last."""
        self._first = self._started_microbatches == 0
        self._started_microbatches += 1
        self._last = last
        self._active = True
        self._microbatch_sqnorm = torch.zeros_like(self._microbatch_sqnorm)
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
        return self._microbatch_sqnorm

    def finish(self) -> Tensor:
        """Send what is left, with the rider, and wait for all sums.

        A worker without a micro-batch in this step contributes zeros.

        Returns:
            Squared norm of the summed gradient: 0-dim float32. Non-finite when any entry is.
        """
        if self._started_microbatches == 0:
            for bucket in self._buckets:
                bucket.gradient.zero_()
        self._used.copy_(torch.tensor(self._used_here))
        self._launch(len(self._buckets))
        total = torch.zeros_like(self._microbatch_sqnorm)
        for pending, bucket in zip(self._pending, self._buckets, strict=True):
            pending.wait()
            started = time.perf_counter()
            total += _sqnorm(bucket.gradient)
            self.statistics_seconds += time.perf_counter() - started
        self._pending = []
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        return total

    def drop_unused(self) -> None:
        """Give parameters that no worker used the gradient None, as a single process would."""
        used = self._used.tolist()
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
        self, named: list[tuple[str, nn.Parameter]], bucket_bytes: int, rider_length: int
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
        if buckets[-1].flat.dtype is torch.float32:
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
        views, gradients = [], []
        for parameter, view, name in zip(
            bucket.parameters, bucket.views, bucket.names, strict=True
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
            gradients.append(parameter.grad)
            self._used_here[self._slot_of[id(parameter)]] = 1.0
            parameter.grad = None
        if gradients:
            if self._measure:
                # Before the copy: on a CPU it then finds the gradients in the cache.
                started = time.perf_counter()
                norms = torch._foreach_norm(gradients, dtype=torch.float32)
                self._microbatch_sqnorm += torch.stack(norms).square().sum()
                self.statistics_seconds += time.perf_counter() - started
            if self._first:
                torch._foreach_copy_(views, gradients)
            else:
                torch._foreach_add_(views, gradients)
        bucket.missing = 0
        if self._last:
            self._launch_ready()

    def _launch_ready(self) -> None:
        # In bucket order on every worker, whatever the order of arrival; the last bucket waits
        # for `finish`, because the rider is complete only then.
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
            self._launch(self._launched + 1)

    def _launch(self, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            self._pending.append(self._start(bucket.flat))
        self._launched = max(self._launched, until)


def _new_bucket(
    named: list[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device, extra: int
) -> _Bucket:
    length = sum(p.numel() for _, p in named)
    flat = torch.zeros(length + extra, dtype=dtype, device=device)
    views, offset = [], 0
    for _, parameter in named:
        piece = flat[offset : offset + parameter.numel()]
        views.append(_view_like(piece, parameter))
        offset += parameter.numel()
    return _Bucket(
        flat=flat,
        gradient=flat[:length],
        parameters=[p for _, p in named],
        names=[n for n, _ in named],
        views=views,
    )


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
