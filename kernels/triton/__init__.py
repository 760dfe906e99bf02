"""Triton kernels of the four ops: on a GPU, or on a CPU through Triton's interpreter (TRITON_INTERPRET=1)."""
