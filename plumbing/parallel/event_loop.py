"""The event loop of a run, in which users' async functions run.

It is made at the first call and runs in a thread of its own until the program ends. What a class
makes in one turn, such as a lock, the client of a server or a task, can therefore be awaited in the
next one, and a run can begin where another loop runs already, as in a notebook.
"""

import asyncio
import functools
import threading

import torch

CLEANUP = 2.0        # seconds that functions which are cancelled have for what they must close


def run_async(*awaitables):
    """The results of awaitables, which run side by side in the event loop of the run. If one of
    them raises, or Ctrl-C ends the wait, the others are cancelled."""
    over = threading.Event()

    async def gather():
        tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CLEANUP)
            over.set()
    future = asyncio.run_coroutine_threadsafe(gather(), event_loop())
    try:
        return future.result()
    except BaseException:
        if future.cancel():                                  # Ctrl-C
            over.wait(2 * CLEANUP)
        raise


@functools.cache
def event_loop():
    loop = asyncio.new_event_loop()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run_forever():
        torch.set_grad_enabled(False)                        # it belongs to the thread, as this one
        if device is not None:
            torch.cuda.set_device(device)
        while True:
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt):          # a task's, who waits for it gets it
                pass
    threading.Thread(target=run_forever, name="event loop", daemon=True).start()
    return loop
