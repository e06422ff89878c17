"""Rates of decoding and of reading a prompt that follow from a placement, as data and in words."""

from dataclasses import dataclass
from typing import NamedTuple

from mla_jax.mesh.cost import MeshCost, Pass
from mla_jax.mesh.host_cost import HostRates

FORECAST_ROWS = 1, 8  # sequences that steps are predicted for, in addition to the batch that is planned for


class Step(NamedTuple):
    """A decode step of some sequences: seconds in all, and of the CPU."""

    rows: int
    seconds: float
    cpu: float = 0.0


class Prompt(NamedTuple):
    """Tokens of a prompt that are read at once, and the seconds they take."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """Steps over `held` tokens per sequence. Without deferred experts; no steps where the device is the CPU itself."""

    held: int
    steps: tuple[Step, ...] = ()
    prompt: Prompt | None = None
    rates: HostRates | None = None

    def lines(self, stream: int) -> list[str]:
        rates = [] if self.rates is None else _said(self.rates)
        steps = [self._step(step) for step in self.steps]
        return rates + steps + ([] if self.prompt is None else [_prompt(self.prompt, stream)])

    def _step(self, step: Step) -> str:
        rows = "1 sequence" if step.rows == 1 else f"{step.rows} sequences"
        rate = f"predicted for {rows} of {self.held:,} tokens: {step.rows / step.seconds:,.1f} tok/s"
        cpu = f", of which the CPU takes {step.cpu * 1e3:,.1f} ms" if step.cpu else ""
        return f"{rate}, a step takes {step.seconds * 1e3:,.1f} ms{cpu}"


def forecast_of(cost: MeshCost, batch: int, held: int, chunk: int) -> Forecast:
    """Steps, and a prompt's chunk where the CPU has experts. On a CPU no steps are predicted: their other costs are not known."""
    rates = None if cost.on_host is None else cost.on_host.rates
    if cost.device.platform == "cpu":
        return Forecast(held, rates=rates)
    steps = tuple(_step(cost, rows, held) for rows in sorted({*FORECAST_ROWS, batch}))
    if rates is None:
        return Forecast(held, steps)
    return Forecast(held, steps, Prompt(chunk, cost.predicted(Pass(1, chunk, chunk)).seconds), rates)


def _step(cost: MeshCost, rows: int, held: int) -> Step:
    found = cost.decode(rows, held)
    return Step(rows, found.seconds, found.host)


def _said(rates: HostRates) -> list[str]:
    reached = f"{rates.bandwidth / 1e9:.1f} GB/s of experts, {rates.flops / 1e12:.2f} TFLOP/s, {rates.call * 1e6:.0f} us per call"
    return [f"{rates.name}: {reached}, {rates.link / 1e9:.1f} GB/s to the device"]


def _prompt(prompt: Prompt, stream: int) -> str:
    streamed = (
        f"experts are streamed to the device from {stream:,} tokens on"
        if stream
        else "experts are never streamed"
    )
    rate = f"{prompt.tokens / prompt.seconds:,.0f} tok/s"
    return f"predicted for a prompt in chunks of {prompt.tokens:,} tokens: {rate}; {streamed}"
