"""Triton kernels of passes over few tokens on CUDA (`switch.py` says where they are used).

The kernels are batch-invariant: every row is computed by the same instructions in the same order, whatever the other
rows are and however many there are. So verification of several tokens gives the bits of decoding one token at a time.
"""
