"""Flat gradient buckets: filled while backward runs, measured, and sent as soon as one is full.

Torch's DDP averages, dies with a lost peer and hides the local gradient; here reductions are sums,
process groups can be replaced between steps, and each bucket is measured before it leaves.

A step on one worker is `begin_step`, then per micro-batch `begin_microbatch` and a backward pass,
then `finish`. Between `finish` and `release` each parameter's `.grad` is a view into its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from adaptive_platform.errors import UserError
from adaptive_platform.gradients.contracts import Exchange, Halves, Pending, Preconditioner
from adaptive_platform.gradients.intake import Intake
from adaptive_platform.gradients.layout import allocate
from adaptive_platform.gradients.norms import Norms, sqnorm
from adaptive_platform.gradients.shards import Reshape, Shards

__all__ = ["GradientBuckets"]


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
        halves: Sums with a moment in between, for what is done with the sum element by element.
            The rider then travels by itself.

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
        halves: Halves | None = None,
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
        device = self.parameters[0].device
        # The rider: the caller's slots, one "was used" mark per parameter, one number per layer; in
        # halves also the norms of the sum, which each worker takes of its own part.
        self._rider_slots = rider_slots
        num_layers = len(named) if layers else 0
        own_end = rider_slots + len(named) + num_layers
        self._buckets = allocate(
            named,
            bucket_bytes,
            own_end + (2 + num_layers if halves is not None else 0),
            rider_apart=start_gradients is not None or exchange is not None or halves is not None,
        )
        if exchange is not None:
            exchange.prepare([b.gradient.numel() for b in self._buckets[:-1]], device)
        last = self._buckets[-1]
        self._rider_all = last.flat[last.gradient.numel() :]
        self.rider = self._rider_all[:rider_slots]
        """Float32 (rider_slots,): written before `finish`, holds the sum over workers after it."""
        self.used = self._rider_all[rider_slots : rider_slots + len(named)]
        """After `finish`: by how many workers each of `parameters` was used."""
        self.layer_rider = self._rider_all[rider_slots + len(named) : own_end]
        """Float32 (layers,) in the order of the buckets, used as `rider` is; empty without."""
        self._norms_rider = self._rider_all[own_end:]
        self._norms = Norms(num_layers, device, preconditioner)
        in_buckets = [p for b in self._buckets for p in b.parameters]
        layer_of = {id(p): layer for layer, p in enumerate(in_buckets)}
        self._model_order = [layer_of[id(p)] for p in self.parameters]
        for bucket in self._buckets:
            if bucket.parameters:
                bucket.first_layer = layer_of[id(bucket.parameters[0])]
        self.shards: Shards | None = None
        """This worker's own parts of the sum, where it is made in halves."""
        if halves is not None:
            self.shards = Shards(self._buckets[:-1], halves, self._norms)
        self._intake = Intake(self._buckets, self._norms, self.shards)
        self._pending: list[Pending] = []
        self._launched = 0
        self._alone = False
        self._started_microbatches = 0
        self._last = self._active = False
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

    def begin_step(
        self,
        *,
        measure: bool,
        squares: bool = False,
        reshape: Reshape | None = None,
        alone: bool = False,
    ) -> None:
        """Forget an unfinished step, if any, and expect the first micro-batch.

        Args:
            measure: Take the squared norm of each micro-batch's gradient.
            squares: With halves, also sum the squared elements of the micro-batches' gradients.
                `finish` then leaves each worker with its shards of both, and `shards.gather` makes
                the sum whole again. Equal on all workers.
            reshape: With halves, changes the shards of the summed gradient on their way, after
                they are measured; has no effect in a step with squares.
            alone: Sum the rider only: each worker keeps the gradient of its own samples. Equal on
                all workers.
        """
        self._alone = alone
        self._active = False
        self._norms.begin_step(measure=measure)
        if self.shards is not None:
            self.shards.begin_step(squares=squares, reshape=reshape)
        self._pending = []
        self._launched = 0
        self._rider_all.zero_()
        self._intake.begin_step()
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
        self._intake.begin_microbatch(
            first=self._started_microbatches == 0, square_weight=square_weight
        )
        self._started_microbatches += 1
        self._last = last
        self._active = True
        self._norms.begin_microbatch()

    def end_microbatch(self) -> Tensor:
        """Take in what backward left, such as buckets with unused parameters.

        Returns:
            Squared norm of this micro-batch's gradient as it was back-propagated: 0-dim float32 on
            the gradients' device, zero where `measure` is off.
        """
        self._intake.end_microbatch()
        if self._last:
            self._launch_ready()
        self._active = False
        self._refuse_leftovers(
            "got its gradient in two parts, as with reentrant activation checkpointing: use "
            "checkpoint(..., use_reentrant=False)."
        )
        return self._norms.microbatch

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
            if self.shards is not None:
                self.shards.clear_squares()
        self._mark_used()
        if self._alone:
            return self._finish_alone()
        if self._exchange is not None:
            return self._finish_exchanged(self._exchange)
        if self.shards is not None:
            return self._finish_in_halves(self.shards)
        self._launch(len(self._buckets))
        total = torch.zeros_like(self._norms.microbatch)
        self._norms.begin_sum()
        for pending, bucket in zip(self._pending, self._buckets, strict=True):
            pending.wait()
            total += self._norms.take_sum(bucket)
        self._pending = []
        self._show()
        return total

    def _finish_in_halves(self, shards: Shards) -> Tensor:
        """Norms are taken where the sum is whole for the first time, and ride with the rest."""
        self._launch(len(self._buckets) - 1)
        for pending in self._pending:
            pending.wait()
        self._pending = []
        norms = self._norms
        self._norms_rider.copy_(shards.measured(norms.summed_layers.numel()))
        self._start(self._rider_all).wait()
        norms.summed = self._norms_rider[1].clone()
        norms.summed_layers.copy_(self._norms_rider[2:])
        self._show()
        return self._norms_rider[0].clone()

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
        self._mark_used()
        self._show()
        return self.own_sqnorm()

    def _mark_used(self) -> None:
        self.used.copy_(torch.tensor([float(id(p) in self._intake.used) for p in self.parameters]))

    def own_sqnorm(self) -> Tensor:
        """Squared norm of what this worker's buckets hold: 0-dim float32."""
        return torch.stack([sqnorm(bucket.gradient) for bucket in self._buckets]).sum()

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
    def preconditioned(self) -> bool:
        """True in a step whose norms, but for the summed gradient's own, are those of `P g`."""
        return self._norms.preconditioned

    @property
    def statistics_seconds(self) -> float:
        """Time that this step's squared norms and squares took on this host."""
        return self._norms.seconds

    @property
    def layer_sqnorms(self) -> Tensor:
        """The last micro-batch's squared norm of each layer, in the order of the buckets."""
        return self._norms.layers

    @property
    def summed_sqnorm(self) -> Tensor:
        """After `finish`: squared norm of the sum as micro-batches are measured, so through P."""
        return self._norms.summed

    @property
    def summed_layer_sqnorms(self) -> Tensor:
        """After `finish`: the squared norm of each layer of the summed gradient."""
        return self._norms.summed_layers

    @property
    def num_bytes(self) -> int:
        """Bytes that one reduction sums, rider included."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._active and self._intake.arrived(parameter) and self._last:
            self._launch_ready()

    def _launch_ready(self) -> None:
        if self._alone or self._exchange is not None:
            return
        # In bucket order on every worker, whatever the order of arrival; the last bucket waits
        # for `finish`, because the rider is complete only then.
        while self._launched < len(self._buckets) - 1 and not self._buckets[self._launched].missing:
            self._launch(self._launched + 1)

    def _launch(self, until: int) -> None:
        for index in range(self._launched, until):
            if self.shards is not None and index < len(self._buckets) - 1:
                self._pending += self.shards.launch(index)
                continue
            rides = index == len(self._buckets) - 1
            start = self._start if rides else self._start_gradients
            self._pending.append(start(self._buckets[index].flat))
        self._launched = max(self._launched, until)
