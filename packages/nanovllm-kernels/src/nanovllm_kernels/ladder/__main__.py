"""Runs the kernel benchmarks: `python -m nanovllm_kernels.ladder`."""

from nanovllm_kernels.ladder import main

if __name__ == "__main__":
    main()
