"""NVIDIA's libraries as kernel launchers call them: cuBLASLt, cuDNN and NCCL."""
