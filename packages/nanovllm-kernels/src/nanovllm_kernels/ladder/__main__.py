"""`python -m nanovllm_kernels.ladder` measures the ladder."""

from nanovllm_kernels.ladder import main

if __name__ == "__main__":
    main()
