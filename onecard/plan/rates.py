"""What a card does per second when it trains: from its figures, or from what `onecard bench` measured on it.

The efficiencies are fitted (benchmarks/results, docs/speed.md) to training runs of onecard and nanoGPT on an
H200 with torch 2.11 and to two public logs of an RTX 4070. A card of another family is an estimate, and
says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecard.hardware.cards import Card
from onecard.hardware.measured import Measured

# Of the dense nominal rate, what long matmuls of training reach, by compute capability. An H200 under
# training is held back by its power; GeForce figures are computed from a boost clock that real cards exceed.
_SUSTAINED = {(8, 0): 0.73, (8, 6): 0.95, (8, 9): 1.0, (9, 0): 0.655, (10, 0): 0.62, (12, 0): 0.95}
_CALIBRATED = {"H200 SXM", "RTX 4070"}
GIVEN = "given"  # the note of a card whose figures are the user's
_PROFESSIONAL = 0.62  # L40S, RTX 6000 Ada, A6000, L4, PRO 6000: datasheet rates their power does not carry
_COPY = 0.90  # of nominal bandwidth (H200: 4.3 of 4.8 TB/s)
_ATTENTION = 0.75 / 0.8415  # of the matmul rate
_FP32_ATTENTION = 0.36  # of the plain cores' rate: its kernel for float32 does not use the tensor cores
# A measured rate is of one matmul, held for seconds; within a step the caches are colder. Fitted to the grid,
# predicted from what `onecard bench` found on that H200.
_WITHIN_A_STEP = 0.94
_REFERENCE_SM_RATE = 989e12 / 132
_REFERENCE_SMS = 132
# A server's cores are many and slow; the host of a GeForce card is likely a desktop's.
_SERVERS = {(8, 0), (9, 0), (10, 0)}
_SERVER_LAUNCH, _USUAL_LAUNCH = 6.7e-6, 3.5e-6
_BUS = {9: 50e9, 10: 50e9, 12: 45e9}
_USUAL_BUS = 22e9  # PCIe 4.0 × 16


@dataclass(frozen=True)
class Rates:
    matmul: float  # FLOP/s of a long matmul
    bandwidth: float  # bytes/s
    attention: float  # FLOP/s
    short: float  # K at which a matmul runs at half its rate
    narrow: float  # width at which a weight's gradient does
    kernel: float  # seconds a kernel takes to begin and end
    launch: float  # seconds the CPU takes to launch one
    to_card: float  # bytes/s over the bus
    to_host: float
    peak: float | None  # nominal, for MFU
    source: str
    calibrated: bool


# A middling card's, to rank settings on one of which nothing is known.
ANY_CARD = Rates(
    matmul=50e12, bandwidth=450e9, attention=45e12, short=20.0, narrow=10.0, kernel=5e-6, launch=7e-6,
    to_card=_USUAL_BUS, to_host=_USUAL_BUS, peak=None, source="no card in particular", calibrated=False,
)  # fmt: skip


def rates_of(card: Card, dtype: str, measured: Measured | None = None) -> Rates | None:
    """The rates of a card in this dtype; None where it cannot compute in it."""
    nominal = card.peak_tflops(dtype)
    if nominal is None:
        return None
    peak = nominal * 1e12
    capability = card.compute_capability or (8, 0)
    share = _SUSTAINED.get(capability, 0.7)
    if card.tdp_w and capability in ((8, 6), (8, 9), (12, 0)) and nominal > 0.9 * (card.fp16acc or nominal):
        share = _PROFESSIONAL
    matmul = share * peak
    bandwidth = _COPY * (card.bandwidth_gbps or 400.0) * 1e9
    bus = _BUS.get(capability[0], _USUAL_BUS)
    launch = _SERVER_LAUNCH if card.compute_capability in _SERVERS else _USUAL_LAUNCH
    to_card, to_host = bus, bus
    source, calibrated = "the card's figures", card.name in _CALIBRATED and card.note != GIVEN
    if measured is not None:
        # A record is of one dtype; another is as much faster or slower as the card's figures say.
        of_record = card.peak_tflops(measured.dtype) or nominal
        matmul = measured.ceiling_tflops * 1e12 * _WITHIN_A_STEP * nominal / of_record
        bandwidth = measured.copy_gbps * 1e9
        launch = measured.launch_us * 1e-6
        to_card, to_host = measured.h2d_gbps * 1e9, measured.d2h_gbps * 1e9
        source, calibrated = f"onecard bench of {measured.date}", True
    sms = card.sm or _REFERENCE_SMS
    attention = _ATTENTION * matmul
    if dtype == "float32" and card.fp32 is not None:
        attention = min(attention, _FP32_ATTENTION * card.fp32 * 1e12)
    return Rates(
        matmul=matmul, bandwidth=bandwidth, attention=attention,
        short=124.0 * (matmul / share / sms) / _REFERENCE_SM_RATE, narrow=26.0 * sms / _REFERENCE_SMS,
        kernel=6e-6 if capability[0] >= 9 else 5e-6, launch=launch, to_card=to_card, to_host=to_host,
        peak=peak, source=source, calibrated=calibrated,
    )  # fmt: skip
