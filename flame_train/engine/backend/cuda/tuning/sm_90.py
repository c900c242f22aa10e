"""Compute capability 9.0, measured on an H200."""

from __future__ import annotations

from .thresholds import Tuning

SM_90 = Tuning(
    whole_packets={1: 5, 2: 2, 3: 2},
    packets_in_flight=6,
    packets_held=24,
    elements_per_total=24,
    gelu_epilogue_elements=1 << 24,
    modulate_groups=64,
    skinny_gemm_rows=512,
    dual_gemm_costs=(1.0, 1.05, 1.02, 1.18),
    dual_gemm_time=1.04,
    second_product_time=490.0,
    tiles_timed=0.75,
    matmul_flops=640e12,
    thin_bytes=3.4e12,
    launch_seconds=5e-6,
    lora_hidden_time=1.13,
    cudnn_forward=1.1,
    cudnn_forward_partial=1.25,
    cudnn_backward_length=2048,
    cudnn_backward_rows=100_000,
    cluster_crowding=1.6,
    head_split_bytes=512 << 20,
    flush_seconds=30e-6,
)
