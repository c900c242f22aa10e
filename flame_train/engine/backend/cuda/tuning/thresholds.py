"""The thresholds that are tuned for an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Thresholds of one architecture. They decide which kernel runs and how work is cut; any value is correct.

    Rows:
    - `whole_packets`: packets of each operand to a thread, by operands, where all threads have as many.
    - `packets_in_flight`: packets of 16 bytes that a thread loads at once, before a row gets more threads.
    - `packets_held`: packets in a thread's registers.
    - `elements_per_total`: elements of an operand to a thread, for each column total that it keeps.

    Elementwise:
    - `gelu_epilogue_elements`: with fewer hidden values, a product's epilogue takes as long as an elementwise kernel.
    - `modulate_groups`: groups of rows that share scale and shift; with more, a pass with sums does not pay.

    Products, for the kernels of compute capability 9.0:
    - `skinny_gemm_rows`: with fewer rows, cuBLASLt's kernels do as well.
    - `dual_gemm_costs`: by tile, the time for an element relative to the first tile's.
    - `dual_gemm_time`: the kernel's time relative to cuBLASLt's first product, at full efficiency.
    - `second_product_time`: what cuBLASLt's second product adds to its first, in the same unit, times K.
    - `tiles_timed`: tiles of at least this share of the best one's efficiency are timed.
    - `matmul_flops`, `thin_bytes`, `launch_seconds`: FLOP/s of large products, bytes/s of thin ones, time of a launch.
    - `lora_hidden_time`: a tile's time where it computes the LoRA's hidden values, relative to where it does not.

    Attention, for the kernels of compute capability 9.0:
    - `cudnn_forward`, `cudnn_forward_partial`: cuDNN's forward time relative to ours, where keys fill its tiles, and
      where they do not.
    - `cudnn_backward_length`, `cudnn_backward_rows`: from here on cuDNN's five products, with sums in any order, are
      faster than our seven.
    - `cluster_crowding`: blocks to a multiprocessor beyond which clusters wait for free ones.
    - `head_split_bytes`: bytes of scores below which attention in two parts of heads saves nothing.

    Timing:
    - `flush_seconds`: somewhat less than a fill of the autotuner's flush buffer takes.
    """

    whole_packets: Mapping[int, int]
    packets_in_flight: int
    packets_held: int
    elements_per_total: int
    gelu_epilogue_elements: int
    modulate_groups: int
    skinny_gemm_rows: int
    dual_gemm_costs: tuple[float, float, float, float]
    dual_gemm_time: float
    second_product_time: float
    tiles_timed: float
    matmul_flops: float
    thin_bytes: float
    launch_seconds: float
    lora_hidden_time: float
    cudnn_forward: float
    cudnn_forward_partial: float
    cudnn_backward_length: int
    cudnn_backward_rows: int
    cluster_crowding: float
    head_split_bytes: int
    flush_seconds: float
