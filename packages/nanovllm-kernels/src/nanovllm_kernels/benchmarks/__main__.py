"""Runs the kernel benchmarks: `python -m nanovllm_kernels.benchmarks`."""

from nanovllm_kernels.benchmarks import main

if __name__ == "__main__":
    main()
