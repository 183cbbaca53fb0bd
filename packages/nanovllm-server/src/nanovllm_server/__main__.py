"""Runs `nanovllm-server` for `python -m nanovllm_server`."""

import sys

from nanovllm_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
