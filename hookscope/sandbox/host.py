"""The process that imports once and forks a worker for every request; it speaks in frames through stdin and stdout."""

import importlib
import json
import os
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from hookscope.sandbox.limits import Limits
from hookscope.sandbox.worker import answer_to, fork_worker, read_frame, write_frame


def serve(preload: Sequence[str], limits: Limits, *, forks: bool) -> NoReturn:
    """Be a host: import, then answer requests from stdin on stdout until there are no more.

    Without `forks` this process answers one itself, and no more. Of the limits its parent watches the seconds.
    """
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # a model may print
    try:
        for name in preload:
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - the parent reports it
        write_frame(answers, json.dumps({"raised": traceback.format_exc()}).encode())
        os._exit(0)
    write_frame(answers, json.dumps({"value": "ready"}).encode())
    while (request := read_frame(requests)) is not None:

        def work(request: bytes = request) -> Any:
            function, item = pickle.loads(request)  # noqa: S301 - by our own parent
            return function(item)

        if not forks:
            write_frame(answers, answer_to(work, limits))
            break
        write_frame(answers, fork_worker(work, limits, parent=(requests, answers)))
    os._exit(0)  # taking the interpreter apart takes half a second once torch is loaded
