"""Attention, and the kernels that it may take."""

from . import kernels as kernels
