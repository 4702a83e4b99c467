"""What a process that will be killed runs; it imports little, since every one of them does."""

import gc
import os
import sys


def begun(log: str, pid: int) -> str:
    """A file that is there once the command runs, and no more the machinery that starts it."""
    return f"{log}.begun-{pid}"


def run_command(arguments: list[str], log: str) -> None:
    """`shoestring …`, as a process of its own runs it."""
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    sys.argv = ["shoestring", *arguments]
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(handle, stream)
    from shoestring.cli.main import main

    open(begun(log, os.getpid()), "w").close()
    main()
